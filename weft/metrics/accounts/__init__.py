"""Where seconds went, from rows."""
