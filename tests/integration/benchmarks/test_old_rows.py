"""Every program that the benchmarks of old rows compare does the same work."""

from __future__ import annotations

from typing import Final

import pytest

from benchmarks import cascade, mariadb, mariadb_programs, pt_archiver, retention
from benchmarks.rounds import compare
from benchmarks.servers import Stage, started

#: Each program starts in a process of its own, and servers of their own are set up.
pytestmark = pytest.mark.slow

_ROWS: Final = 2_000


def test_every_program_on_postgresql_processes_all_rows() -> None:
    with started(durable=False) as servers:
        comparisons = (*retention.COMPARISONS, retention.GROWING_BATCHES)
        outcomes = [compare(Stage(servers), each, _ROWS, 1, []) for each in comparisons]

    done = {(each.comparison.name, name): turns[0].done for each in outcomes for name, turns in each.turns.items()}
    expected = {(each.name, name): _ROWS for each in comparisons for name in each.contestants}
    assert done == expected


def test_every_program_deletes_accounts_with_all_that_depends_on_them() -> None:
    with started(durable=False) as servers:
        outcome = compare(Stage(servers), cascade.COMPARISON, 30_000, 1, [])

    # Ten accounts, each with 10 orders, 100 items and 3,000 events.
    done = {name: turns[0].done for name, turns in outcome.turns.items()}
    assert done == dict.fromkeys(cascade.COMPARISON.contestants, 31_110)
    assert all(turns[0].longest_seconds is not None for turns in outcome.turns.values())


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
