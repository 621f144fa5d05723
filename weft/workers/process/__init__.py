"""The fork server; workers, spares and savers, from their start on; their output and footprint."""
