"""Chaos suite: real processes and servers under injected faults (``pytest tests/chaos``)."""
