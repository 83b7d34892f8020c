"""Simulator of the real middleware and engine on simulated stores, with a virtual clock and injected faults.

``python -m tests.simulator --help`` says how it is run; docs/explanation/simulator.md says what it shows.
"""
