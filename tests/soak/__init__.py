"""Soak test: enough messages to show anything that grows with their number (``pytest tests/soak``)."""
