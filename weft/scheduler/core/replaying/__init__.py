"""Replaying: an iteration that is run again by other workers, and what comes of comparing both."""
