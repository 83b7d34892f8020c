"""Redeliveries a second after a worker's death, for a process that imports this module at start."""

from __future__ import annotations

from datetime import timedelta

from dramatiq.brokers.redis import RedisBroker

from housekeeping.middleware import delivery

_SHORT = ((delivery, "RUNNING_TTL", timedelta(seconds=2)), (delivery, "_RUNNING_DELAY", timedelta(seconds=0.5)))
for module, name, value in _SHORT:
    getattr(module, name)  # a name that no longer exists would shorten nothing
    setattr(module, name, value)
defaults = RedisBroker.__init__.__kwdefaults__
assert defaults is not None and "heartbeat_timeout" in defaults
defaults["heartbeat_timeout"] = 1000
