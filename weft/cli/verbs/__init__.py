"""One file for each family of verbs."""
