"""A model cut by its own forward: every stage runs the user's whole step, and skips the calls that are not its own."""
