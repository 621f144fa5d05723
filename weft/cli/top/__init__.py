"""`weft top`: its state, its view, its keys."""
