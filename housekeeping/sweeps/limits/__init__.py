"""Limits of a run: breaker, confirmation of a large first run, throttle.

`declared` has the limits as a sweep declares them. `breaker` and `first_run` are checked once, before the first batch.
`throttle` is checked before each batch, with the values of `db_health`.
"""
