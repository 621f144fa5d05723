"""The oracle: the plain PyTorch loop that results are compared with."""
