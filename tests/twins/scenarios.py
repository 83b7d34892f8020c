"""Faults of single parts of the engine: servers that fail, archives, cascades, purges, partitions, actions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from peewee import SQL

from tests.internals.database import connection
from tests.internals.engine import Restore
from tests.internals.ledger import Run, operators, runs
from tests.internals.sweeps import Statements, Write, actions, moved, partition_catalog
from tests.internals.workers import StoreDeletion
from tests.twins import Twin
from tests.twins.planting import instead

_DATABASE: Final = "tests/integration/sweeps/limits/test_sick_database.py"
_STORE: Final = "tests/integration/workers/object_storage/test_half_answers.py"
_ARCHIVE: Final = "tests/integration/archives/test_archive.py::"
_RESTORE: Final = "tests/integration/archives/test_restore.py::"
_CASCADE: Final = "tests/integration/cascades/test_staying.py::"
_PURGE: Final = "tests/integration/purge/test_purge.py::"
_TESTS: Final = "tests/integration/sweeps/partitions/"
_LOG: Final = "tests/integration/sweeps/ledger/test_action_log.py::"


def _sets_no_statement_timeout(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(connection, "_SESSION", "-c timezone=UTC")


def _treats_failed_deletions_as_done(patch: pytest.MonkeyPatch) -> None:
    answers = StoreDeletion._answers
    patch.setattr(StoreDeletion, "_answers", lambda *args: dict.fromkeys(answers(*args)))


def _ignores_rows_that_the_archive_refuses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(actions, "moved", lambda *given: (moved(*given)[0], SQL("true")))


def deletes_dependents_of_fresh_parents(patch: pytest.MonkeyPatch) -> None:
    conditions = Statements._may_change

    def broken(self: Statements, window: Any) -> list[Any]:
        return [each for each in conditions(self, window) if each is not self._conditions.get("stale")]

    patch.setattr(Statements, "_may_change", broken)


def leaves_restored_rows_in_the_archive(patch: pytest.MonkeyPatch) -> None:
    write = Restore.write

    def broken(self: Restore, *given: Any) -> Write:
        found = write(self, *given)
        left: Any = found.before[-1]
        left._query = left._query.where(SQL("false"))
        return replace(found, holds=SQL("true"))  # type: ignore[arg-type]

    patch.setattr(Restore, "write", broken)


TWINS: Final[list[Twin]] = [
    Twin(
        "F8",
        "sets_no_statement_timeout",
        f"{_DATABASE}::test_session_timeouts_end_a_batch_before_its_run_counts_as_dead",
        _sets_no_statement_timeout,
    ),
    Twin(
        "F9",
        "treats_failed_deletions_as_done",
        f"{_STORE}::test_unconfirmed_deletions_are_finished_by_the_next_run",
        _treats_failed_deletions_as_done,
    ),
    Twin(
        "A1",
        "ignores_rows_that_the_archive_refuses",
        f"{_ARCHIVE}test_trigger_that_keeps_rows_out_of_the_archive_stops_the_run",
        _ignores_rows_that_the_archive_refuses,
    ),
    Twin(
        "A2",
        "leaves_restored_rows_in_the_archive",
        f"{_RESTORE}test_run_is_restored_exactly",
        leaves_restored_rows_in_the_archive,
    ),
    Twin(
        "C1",
        "deletes_dependents_of_fresh_parents",
        f"{_CASCADE}test_parent_that_becomes_fresh_keeps_what_is_left",
        deletes_dependents_of_fresh_parents,
    ),
    Twin(
        "C2",
        "deletes_parents_before_their_dependents",
        f"{_CASCADE}test_parent_stays_while_the_application_adds_dependents_to_it",
        instead(Statements, "is_free", lambda *given: ("TRUE", [])),
    ),
    Twin(
        "P1",
        "resumes_a_purge_twice",
        f"{_PURGE}test_of_two_processes_that_resume_a_purge_one_begins",
        instead(runs, "_resuming", lambda run_id: Run.select(Run.id).where(SQL("false"))),
    ),
    Twin(
        "F3",
        "forgets_detached_partitions",
        _TESTS + "test_killed.py::test_run_killed_between_detach_and_drop_is_finished_by_the_next",
        instead(partition_catalog, "detached_from", lambda table: ()),
    ),
    Twin(
        "O1",
        "logs_no_action",
        f"{_LOG}test_action_is_logged_with_user_target_and_result",
        instead(operators, "_in_main", lambda write: (None, None)),
    ),
]
