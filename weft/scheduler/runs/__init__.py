"""What the daemon keeps of a running job: run directory, accounts, figures, recording, result."""
