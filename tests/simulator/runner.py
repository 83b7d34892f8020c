"""Plays many schedules, in several processes, and twins until they are caught."""

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

#: The machine's own, before the world's takes its place.
_clock: Final = time.perf_counter
_CHUNK: Final = 50  # schedules between two words of a process


@dataclass
class Tally:
    """What a number of schedules came to."""

    schedules: int = 0
    points: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    broken: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, verdict: Verdict) -> None:
        """Count a schedule."""
        self.schedules += 1
        self.points += verdict.points
        self.struck += verdict.struck
        if verdict.broken:
            self.broken.append(verdict)

    def join(self, other: Tally) -> None:
        """Count another's schedules too."""
        self.schedules += other.schedules
        self.points += other.points
        self.struck += other.struck
        self.broken += other.broken


def play_one(seed: int, twin: str | None = None) -> Verdict:
    """One schedule in this interpreter, which is the simulator's from now on."""
    connect()
    if twin is not None:
        TWINS[twin]()
    return judged(seed)


def play_many(first: int, number: int, processes: int, twin: str | None = None) -> Iterator[Tally]:
    """The schedules of so many seeds; yields what there is so far, now and then, and at last all of it.

    Ends at the first that breaks an invariant.
    """
    started = _clock()
    total = Tally()
    context = multiprocessing.get_context("fork")
    parts = [(each, min(_CHUNK, first + number - each), twin) for each in range(first, first + number, _CHUNK)]
    # A process for each part of the work: what a twin breaks, and what memory keeps, ends with it.
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
            # Not an `Exception`, and the pool would wait for this process for ever.
            raise RuntimeError(f"seed {seed}: {type(error).__name__}: {error}") from error
        if tally.broken:
            break
    return tally
