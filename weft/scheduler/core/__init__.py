"""The state machine: events in, commands out. Pure."""
