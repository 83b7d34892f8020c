"""A simulator: the real middleware and engine over scripted stores, under a virtual clock and scripted faults.

``python -m tests.simulator --help`` says how it is run; docs/explanation/simulator.md says what it shows.
"""
