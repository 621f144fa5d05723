"""Frames, messages and the socket's directory. No torch."""
