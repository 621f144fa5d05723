"""Pictures and reports made of a recording."""
