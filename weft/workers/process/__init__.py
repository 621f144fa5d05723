"""The fork server, the worker process, its output and footprint."""
