"""The user's code: how it is loaded, cut into units, seeded, fed, optimised; and what it raises."""
