"""What the command line, the dashboard and the demo share: reading operators' input and describing results in text.

Start with `formatting` (counts, times, overrides, requeued messages). `time_parsing` reads times, and `workers` looks
up a worker and its argument.
"""
