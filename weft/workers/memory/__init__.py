"""Where a job's tensors lie in a worker: slots, buckets, replica, window."""
