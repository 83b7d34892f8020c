"""Schedules: actors that run at ticks, each tick with at most one message and exactly one outcome.

Start with `middleware`. `due_ticks` decides once a minute, when periodiq asks, whether a tick is sent. `tick_store`
records in Redis which ticks were sent or missed. `tick_recorder` writes the outcomes of ticks to the run ledger, by the
statements of `tick_rows`, and keeps those that it cannot write.
"""
