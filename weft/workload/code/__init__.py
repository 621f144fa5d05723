"""Code: whether a job's is what it was."""
