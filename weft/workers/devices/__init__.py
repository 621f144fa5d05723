"""What a worker computes on: the host, the stand-in, CUDA."""
