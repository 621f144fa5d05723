"""A recorded job under other settings. Pure."""
