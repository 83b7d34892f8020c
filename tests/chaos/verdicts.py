"""Verdicts on lost and repeated effects, from the audit and the final state of an undisturbed run."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any, Final

import psutil

from tests.acceptance.processes import Process
from tests.chaos.families import State
from tests.chaos.figures import Figures
from tests.chaos.trial import Trial

#: Final state by actor.
Undisturbed = dict[str, State]

_PATIENCE_S: Final = 120.0
_BETWEEN_TICKS_S: Final = 1.0
_MOST_TICKS: Final = 10
_LINES, _LONGEST_LINE = 30, 500


def undisturbed_run(trial: Trial) -> Undisturbed:
    """Let the workers process a round without faults. Return its final state with relative ids."""
    trial.fill(1)
    before = trial.left(1)
    worker = trial.worker()
    for _ in range(_MOST_TICKS):
        trial.tick()
        drain(trial, worker)
        if trial.recorder.last_outcomes() == {"done"}:  # on a busy machine a run may end by its time limit
            break
    left = trial.left(1)
    assert all(left[actor] != before[actor] for actor in left), worker.text()
    assert verdict(trial, left, Figures()) == []
    return left


def drain(
    trial: Trial,
    *processes: Process,
    expected: Undisturbed | None = None,
    patience_s: float = _PATIENCE_S,
    ticking: bool = True,
) -> None:
    """Send messages like a schedule, without faults, until the queues are empty and every round is done.

    Fails with the processes' logs when that does not come true.

    Parameters:
      ticking: Whether messages are sent meanwhile; without, those that are there must do the work.
    """
    deadline, next_tick = time.monotonic() + patience_s, time.monotonic() + _BETWEEN_TICKS_S
    not_sent: list[str] = []
    while (waiting := trial.waiting) or unprocessed(trial, expected):
        if time.monotonic() > deadline:
            complaints = "\n".join(line for process in processes for line in [*_complaints(process), *_stacks(process)])
            there = "\n".join([*trial.whereabouts(), *trial.recorder.ends(), f"not sent: {not_sent}"])
            raise AssertionError(
                f"{waiting} wait, unprocessed: {unprocessed(trial, expected)}; where:\n{there}\nthe logs:\n{complaints}"
            )
        if ticking and time.monotonic() > next_tick and not waiting:
            not_sent = trial.tick()
            next_tick = time.monotonic() + _BETWEEN_TICKS_S
        time.sleep(0.05)


def _complaints(process: Process) -> list[str]:
    """Return the last warnings and errors of a process."""
    lines = [line for line in process.text().splitlines() if '"level": "info"' not in line]
    return [line[:_LONGEST_LINE] for line in lines[-_LINES:]]


def _stacks(process: Process) -> list[str]:
    """Return the stacks of a worker's threads."""
    if process.running.poll() is not None:
        return [f"process {process.running.pid} has ended with {process.running.returncode}"]
    before = len(process.text())
    for child in psutil.Process(process.running.pid).children():
        child.send_signal(signal.SIGUSR1)
    time.sleep(1)  # time to write them; the test has failed already
    return process.text()[before:].splitlines()


def unprocessed(trial: Trial, expected: Undisturbed | None) -> list[str]:
    """Return the rounds that differ from an undisturbed run; empty if nothing is expected."""
    if expected is None:
        return []
    return [
        f"{actor}, round {round}"
        for round in trial.rounds
        for actor, left in trial.left(round).items()
        if left != expected[actor]
    ]


def verdict(trial: Trial, undisturbed: Undisturbed, figures: Figures) -> list[str]:
    """Return all errors, and count them in the figures."""
    lost: list[str] = []
    for round in trial.rounds:
        for actor, left in trial.left(round).items():
            lost += [f"{actor}: {row} is left of round {round}" for row in _more(left, undisturbed[actor])]
            lost += [f"{actor}: {row} is not left of round {round}" for row in _more(undisturbed[actor], left)]
    lost += [text for family in trial.families for text in family.complaints(trial.place)]
    doubled = trial.recorder.complaints()
    figures.lost += len(lost)
    figures.doubled += len(doubled)
    figures.processed += sum(family.stale for families in trial.rounds.values() for family in families)
    figures.commits += trial.recorder.commits()
    return lost + doubled


def _more(these: Sequence[tuple[Any, ...]], than: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    known = set(than)
    return [row for row in these if row not in known]
