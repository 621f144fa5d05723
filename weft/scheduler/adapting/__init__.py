"""Policies with a memory that change a running job: shares, stealing, routes, another plan. Pure."""
