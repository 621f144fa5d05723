"""The daemon's process: the pure state machine, planner and policies, and what keeps and runs them."""
