"""Every program that the benchmarks of old rows compare does the same work."""

from __future__ import annotations

from typing import Final

import pytest

from benchmarks import mariadb, mariadb_programs, pt_archiver, retention
from benchmarks.rounds import compare
from benchmarks.servers import Stage, started

#: Each program starts in a process of its own, and servers of their own are set up.
pytestmark = pytest.mark.slow

_ROWS: Final = 2_000


def test_every_program_on_postgresql_processes_all_rows() -> None:
    with started(durable=False) as servers:
        outcomes = [compare(Stage(servers), each, _ROWS, 1, []) for each in retention.COMPARISONS]

    done = {(each.comparison.name, name): turns[0].done for each in outcomes for name, turns in each.turns.items()}
    expected = {(each.name, name): _ROWS for each in retention.COMPARISONS for name in each.contestants}
    assert done == expected


def test_every_program_on_mariadb_processes_all_rows() -> None:
    missing = mariadb.missing_programs()
    if missing is not None:
        pytest.skip(missing)

    with mariadb.started() as server:
        outcomes = pt_archiver.compare(server, _ROWS, 1)

    done = {(each.comparison.name, name): turns[0].done for each in outcomes for name, turns in each.turns.items()}
    expected = {
        (name, each): _ROWS // program.part
        for name, programs in mariadb_programs.PROGRAMS.items()
        for each, program in programs.items()
    }
    assert done == expected
