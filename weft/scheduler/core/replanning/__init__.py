"""A job that runs goes on with another plan."""
