"""Schedules: actors that run at ticks, each tick with at most one message and exactly one outcome.

Start with `middleware`, which periodiq asks once a minute what is due. `tick_store` remembers in Redis which ticks are
settled. `tick_recorder` writes the outcomes of ticks to the run ledger. `setup_checks` leaves out sweeps that are not
set up.
"""
