"""Limits of a run: breaker, first run, throttle. Start with `breaker`."""
