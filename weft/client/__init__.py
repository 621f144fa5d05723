"""The Python client, and the daemon in a `with` block."""
