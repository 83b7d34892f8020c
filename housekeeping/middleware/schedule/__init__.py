"""Schedules: actors that run at ticks, each tick with at most one message and exactly one outcome.

Start with `middleware`, which periodiq calls once a minute. `tick_store` records in Redis which ticks were sent or
missed. `tick_recorder` writes the outcomes of ticks to the run ledger. `setup_checks` finds sweeps that are not set up;
they get no messages.
"""
