"""Sentences and tables for people."""
