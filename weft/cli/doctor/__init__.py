"""`weft doctor`: facts of machine and daemon, and what is found amiss."""
