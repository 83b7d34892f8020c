"""Interrupts of actors: by the shutdown of their process, or by their time limit.

Start with `shutdown`. `statements` cancels the SQL statement that an interrupted actor waits for. `time_limit` replaces
the part of Dramatiq's `TimeLimit` that raises exceptions in threads. Both use `core.thread_interrupt`.
"""
