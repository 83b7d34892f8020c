"""Shorter heartbeats and heartbeat timeouts for a process that imports this module at start."""

from __future__ import annotations

from datetime import timedelta

from housekeeping.sweeps.ledger import runs
from housekeeping.sweeps.processes import alerts, heartbeats

_SHORT = (
    (heartbeats, "INTERVAL", timedelta(seconds=0.5)),
    (heartbeats, "SILENCE", timedelta(seconds=4)),
    (runs, "SILENCE", timedelta(seconds=4)),
    (alerts, "GRACE", timedelta(seconds=4)),
    (alerts, "_PERIODS", 0),
)
for module, name, value in _SHORT:
    getattr(module, name)  # a name that no longer exists would shorten nothing
    setattr(module, name, value)
