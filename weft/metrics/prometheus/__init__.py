"""Declared metrics, histogram, exporter."""
