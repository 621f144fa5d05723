"""Backward: what of it a stage hands back to others, and the two parts that it may be split into."""
