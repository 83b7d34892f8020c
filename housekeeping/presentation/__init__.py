"""What the command line, the dashboard and the demo share: reading operators' input and describing results in text.

Start with `formatting` (durations, counts, times). `time_parsing` reads times, `workers` looks up a worker and its
argument, and `descriptions` phrases overrides and requeued messages.
"""
