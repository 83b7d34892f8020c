"""Broker of the dashboard, made when a page first needs it."""

from __future__ import annotations

import threading

from dramatiq import Broker

from housekeeping.brokers.dead_letters import DeadLetterStore, dead_letters_of
from housekeeping.core.settings import Settings
from housekeeping.installation import broker_without_database
from housekeeping.sweeps.declaration import Sweep


class LazyBroker:
    """Broker of the ready-made application, which knows the actors and their options. Thread-safe."""

    def __init__(self, settings: Settings, sweeps: dict[str, Sweep]) -> None:
        self._settings, self._sweeps = settings, sweeps
        self._lock = threading.Lock()
        self._made: Broker | None = None

    def get(self) -> Broker:
        """Return the broker. It connects with its first command."""
        with self._lock:
            if self._made is None:
                self._made = broker_without_database(self._settings, self._sweeps)
            return self._made

    def dead_letters(self) -> DeadLetterStore:
        """Return the broker's dead letters."""
        return dead_letters_of(self.get())
