"""The HTTP side: metrics, health, the page."""
