"""What verbs read of a job that was recorded."""
