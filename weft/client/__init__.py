"""The Python clients, the daemon in a `with` block, a job as a call, and what people see of a job meanwhile."""
