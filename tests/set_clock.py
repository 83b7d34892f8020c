"""periodiq's own loop on a clock that a test sets: days of it pass in a moment."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pendulum
import periodiq
import pytest


class Machine:
    """The machine's clock and alarm. A wait ends at once, at the requested time and a little more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, start: datetime, zone: str = "UTC") -> None:
        self.time = start
        self._zone = zone
        self._steps: list[tuple[datetime, timedelta]] = []
        self._end = start
        self._scheduler: Any = None
        edge = {
            "pendulum": SimpleNamespace(now=self._now),
            "sleep": self.pass_time,
            "alarm": self._alarm,
            "signal": lambda number, handler: handler(),
        }
        for name, own in edge.items():
            monkeypatch.setattr(periodiq, name, own)

    def run_scheduler(self, *actors: Any, until: datetime) -> None:
        self._end = until
        self._scheduler = periodiq.Scheduler(actors=actors)
        self._scheduler.schedule()
        self._scheduler.loop()

    def step_clock(self, at: datetime, by: timedelta) -> None:
        self._steps.append((at, by))

    def pass_time(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)
        if self._steps and self.time >= self._steps[0][0]:
            self.time += self._steps.pop(0)[1]

    def _now(self) -> pendulum.DateTime:
        return pendulum.instance(self.time).in_timezone(self._zone)

    def _alarm(self, seconds: int) -> None:
        self.pass_time(seconds + 0.03)
        if self.time > self._end:
            self._scheduler.alarm_q.put(False)
