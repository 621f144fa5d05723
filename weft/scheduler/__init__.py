"""Scheduler: the pure core (graph, schedules, planner, simulator, core) and the daemon's shell around it."""
