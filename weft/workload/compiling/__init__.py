"""Compiling: kernels that torch.compile makes of units."""
