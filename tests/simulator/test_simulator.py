"""Short tests of the simulator: schedules pass, a broken twin is caught, and a seed decides everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def _simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A new process, because the simulator replaces clock and random numbers.
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator", *arguments],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("schedules", ["5", pytest.param("40", marks=pytest.mark.slow)])
def test_schedules_pass_every_invariant(schedules: str) -> None:
    ended = _simulate("--schedules", schedules)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith(f"{schedules} schedules")


@pytest.mark.slow
def test_broken_twin_is_caught_and_harmless_one_is_reported() -> None:
    ended = _simulate("--twins", "--only", "key_never_released,missed_ticks_not_recorded", "--schedules", "3")

    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert (
        "caught within     1 schedules: key_never_released (a_key_is_free_when_its_message_has_ended)" in ended.stdout
    )
    assert "NOT CAUGHT within 3 schedules: missed_ticks_not_recorded" in ended.stdout


@pytest.mark.slow
def test_failed_schedule_is_reproducible_by_its_seed() -> None:
    first, second = (_simulate("--replay", "0", "--twin", "duplicates_enqueued", "--verbose") for _ in range(2))

    assert first.returncode == 1
    assert "BROKEN at_most_one_message_of_a_key_is_live" in first.stdout
    assert "again: python -m tests.simulator --replay 0" in first.stdout
    assert first.stdout.splitlines()[-1].startswith("history ")
    assert first.stdout == second.stdout
