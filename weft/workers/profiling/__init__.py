"""torch.profiler beside the lanes."""
