"""What a process reports about itself: log lines, metrics, traces, errors, and the time it waited for servers.

Start with `logs` for the shape of a log line and `metrics` for the list of all metrics. `context` holds what belongs to
the current thread, such as its message, which the others attach to what they report.
"""
