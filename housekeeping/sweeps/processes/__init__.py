"""Heartbeats of the worker and scheduler processes, and alerts about them. Start with `heartbeats`."""
