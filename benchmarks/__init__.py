"""What a sweep costs, beside the best hand-written program for the same work: ``python -m benchmarks``."""
