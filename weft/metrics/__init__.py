"""Metrics: rows into figures, and what is shown of them: accounts, Prometheus, recordings, pictures, boards."""
