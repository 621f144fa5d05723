"""What the planner must know of a job, found out by running it."""
