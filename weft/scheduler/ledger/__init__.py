"""The daemon's jobs on disk: rows, the file, what it has not taken yet."""
