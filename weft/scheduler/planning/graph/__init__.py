"""Tasks and edges of an iteration: pipeline, buckets, window. Pure."""
