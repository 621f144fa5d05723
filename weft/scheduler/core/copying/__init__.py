"""Copying: snapshots of a running job, from when they are due to when they are on the disk."""
