"""FORWARD, BACKWARD, GRAD: stages, gradients, weights."""
