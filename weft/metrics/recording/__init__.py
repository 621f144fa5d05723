"""The kept past of a job: its recording, windows of it, its critical path."""
