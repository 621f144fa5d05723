"""A worker's lanes: operations in order, their waits and their stamps."""
