"""The simulator in short: some hundred schedules hold, every broken twin is caught, and a seed decides everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.twins import TWINS

_ROOT = Path(__file__).parents[2]


def _simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: there, time and chance are the world's.
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator", *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_some_hundred_schedules_hold_every_invariant() -> None:
    ended = _simulate("--schedules", "150")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("150 schedules")


@pytest.mark.parametrize("name", ["duplicates_enqueued", "cursor_before_the_batch", "again_mark_not_made"])
def test_a_broken_twin_is_caught(name: str) -> None:
    ended = _simulate("--twins", "--only", name, "--schedules", "300")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert name in ended.stdout


def test_a_twin_that_breaks_nothing_is_reported() -> None:
    ended = _simulate("--twins", "--only", "missed_ticks_not_recorded", "--schedules", "1")

    assert ended.returncode == 1
    assert "NOT CAUGHT" in ended.stdout


def test_the_same_seed_has_the_same_history_in_another_process() -> None:
    first, second = (_simulate("--replay", "39", "--verbose").stdout for _ in range(2))

    assert first.splitlines()[-1].startswith("history ")
    assert first == second


def test_a_schedule_that_breaks_an_invariant_is_shown_with_its_seed() -> None:
    ended = _simulate("--schedules", "50", "--twin", "duplicates_enqueued")

    assert ended.returncode == 1
    assert "BROKEN at_most_one_message_of_a_key_is_live" in ended.stdout
    assert "again: python -m tests.simulator --replay" in ended.stdout


def test_there_are_at_least_fifteen_twins() -> None:
    assert len(TWINS) >= 15
