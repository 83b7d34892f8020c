"""Benchmarks of sweeps against hand-written programs for the same work: ``python -m benchmarks``."""
