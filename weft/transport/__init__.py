"""Transport: the wire (msgpack frames), and the shared memory that tensors move through."""
