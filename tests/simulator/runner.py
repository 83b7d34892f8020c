"""Runner of many schedules in several processes, and of twins until they are caught."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.simulator.processes import connect
from tests.simulator.schedule import Verdict, judged
from tests.simulator.twins import TWINS

#: Real clock, before the virtual one replaces it.
_clock: Final = time.perf_counter
_CHUNK: Final = 50  # schedules between two reports of a process


@dataclass
class Tally:
    """Results of several schedules."""

    schedules: int = 0
    points: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    broken: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, verdict: Verdict) -> None:
        """Add a schedule."""
        self.schedules += 1
        self.points += verdict.points
        self.struck += verdict.struck
        if verdict.broken:
            self.broken.append(verdict)

    def join(self, other: Tally) -> None:
        """Add the schedules of another tally."""
        self.schedules += other.schedules
        self.points += other.points
        self.struck += other.struck
        self.broken += other.broken


def play_one(seed: int, twin: str | None = None) -> Verdict:
    """Play one schedule. The interpreter cannot be used for anything else afterward."""
    connect()
    if twin is not None:
        TWINS[twin]()
    return judged(seed)


def play_many(first: int, number: int, processes: int, twin: str | None = None) -> Iterator[Tally]:
    """Play the schedules of this many seeds. Yield the tally from time to time, and at the end.

    Ends at the first that breaks an invariant.
    """
    started = _clock()
    total = Tally()
    context = multiprocessing.get_context("fork")
    parts = [(each, min(_CHUNK, first + number - each), twin) for each in range(first, first + number, _CHUNK)]
    # One process per chunk, so that planted faults and memory end with it.
    with context.Pool(processes, initializer=_begin, initargs=(twin,)) as pool:
        for part in pool.imap_unordered(_played, parts):
            total.join(part)
            total.seconds = _clock() - started
            yield total
            if total.broken:
                pool.terminate()
                return


def _begin(twin: str | None) -> None:
    connect()
    if twin is not None:
        TWINS[twin]()


def _played(part: tuple[int, int, Any]) -> Tally:
    first, number, _ = part
    tally = Tally()
    for seed in range(first, first + number):
        try:
            tally.add(judged(seed))
        except BaseException as error:
            # Not an `Exception`: the pool would wait forever.
            raise RuntimeError(f"seed {seed}: {type(error).__name__}: {error}") from error
        if tally.broken:
            break
    return tally
