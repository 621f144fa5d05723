"""Schedules: in which order each worker of a pipeline computes what; as values. Pure."""
