"""`weft compare`: trials of strategies."""
