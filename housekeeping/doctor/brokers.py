"""The broker: its queues and what lies dead in them."""

from __future__ import annotations

from collections.abc import Iterator

from housekeeping.foundation.settings import Settings
from housekeeping.queues import queue_lengths
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.findings import Finding


def examine(settings: Settings, sweeps: dict[str, Sweep]) -> Iterator[Finding]:
    """Whether it answers, and what lies in its queues."""
    lengths = queue_lengths(settings, sorted({sweep.queue for sweep in sweeps.values()}))
    waiting = ", ".join(f"{name} {each.waiting:,} waiting" for name, each in lengths.items())
    yield Finding("fine", "broker", "connection", waiting or "no queues")
    for name, each in lengths.items():
        if each.dead:
            text = f"{each.dead:,} dead letters in queue {name}"
            yield Finding("warning", "broker", "dead letters", text, "housekeeping deadletters list")
