"""Metrics: interval accounting over stamped records, and its Prometheus view."""
