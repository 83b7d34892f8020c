"""Shorter heartbeats and heartbeat timeouts for a process that imports this module at start."""

from __future__ import annotations

from datetime import timedelta

from housekeeping.engine import alerts
from housekeeping.ledger import processes, runs

_SHORT = (
    (processes, "INTERVAL", timedelta(seconds=0.5)),
    (processes, "SILENCE", timedelta(seconds=4)),
    (processes, "LONG_BUSY", timedelta(seconds=2)),
    (runs, "SILENCE", timedelta(seconds=4)),
    (alerts, "SILENCE", timedelta(seconds=4)),
    (alerts, "GRACE", timedelta(seconds=4)),
    (alerts, "_PERIODS", 0),
)
for module, name, value in _SHORT:
    getattr(module, name)  # a name that no longer exists would shorten nothing
    setattr(module, name, value)
