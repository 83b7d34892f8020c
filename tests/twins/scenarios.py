"""Faults of the handling of failing databases, object stores and git (F8, F9)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import PurePath
from typing import Any, Final

import pytest
from peewee import OperationalError

from housekeeping.database import connection, peewee_database
from housekeeping.sweeps.engine import executor
from housekeeping.sweeps.ledger import run_start, runs
from housekeeping.sweeps.stages import bisection
from housekeeping.workers.batched_git_ref_updates import cleanup
from housekeeping.workers.batched_git_ref_updates.ref_deletion import (
    RefDeletion,
    RefDeletionFailed,
    RefResult,
    RefsRefused,
)
from housekeeping.workers.object_storage.deletion import Deletion
from tests.twins import Twin

_DATABASE: Final = "tests/integration/sweeps/limits/test_sick_database.py"
_GIT: Final = "tests/integration/workers/batched_git_ref_updates/test_git_faults.py"
_STORE: Final = "tests/integration/workers/object_storage/test_half_answers.py"


def _records_no_reason(patch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OperationalError("never asked")

    patch.setattr(runs, "fail", fail)


def _leaves_transactions_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peewee_database._Transaction, "_roll_back", lambda self: None)


def _considers_no_run_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "SILENCE", timedelta(days=10))


def _starts_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_start, "_stopped_at", lambda *args: None)


def _counts_rows_as_failed_for_the_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bisection, "_CANNOT_WRITE", "no such class")


def _sets_no_statement_timeout(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(connection, "_SESSION", "-c timezone=UTC")


def _counts_rolled_back_rows(patch: pytest.MonkeyPatch) -> None:
    commit = executor.Executor.commit

    def counting(self: executor.Executor, apply: Any, state: Any, record: Any) -> Any:
        try:
            return commit(self, apply, state, record)
        except OperationalError:
            state.counts["deleted_rows"] += 10
            raise

    patch.setattr(executor.Executor, "commit", counting)


def _treats_failed_deletions_as_done(patch: pytest.MonkeyPatch) -> None:
    in_bulk = Deletion._in_bulk
    patch.setattr(Deletion, "_in_bulk", lambda *args: in_bulk(*args) or True)


def _treats_a_failed_git_as_done(patch: pytest.MonkeyPatch) -> None:
    def delete_refs(
        deletion: RefDeletion, repository: PurePath, refs: Sequence[str], *args: Any
    ) -> Iterator[RefResult]:
        try:
            deletion.delete(repository, refs)
        except RefDeletionFailed:
            pass
        yield from ((ref, None) for ref in refs)

    patch.setattr(cleanup, "delete_refs", delete_refs)


def _fails_all_refs_with_one(patch: pytest.MonkeyPatch) -> None:
    def delete_refs(
        deletion: RefDeletion, repository: PurePath, refs: Sequence[str], *args: Any
    ) -> Iterator[RefResult]:
        try:
            deletion.delete(repository, refs)
        except RefsRefused as refused:
            yield from ((ref, refused) for ref in refs)
        else:
            yield from ((ref, None) for ref in refs)

    patch.setattr(cleanup, "delete_refs", delete_refs)


TWINS: Final[list[Twin]] = [
    Twin(
        "L3",
        "leaves_an_interrupted_transaction_open",
        "tests/integration/database/test_connection.py::test_interrupt_at_the_end_of_a_transaction_leaves_none_open",
        _leaves_transactions_open,
    ),
    Twin(
        "F8",
        "records_no_reason_of_a_failed_run",
        f"{_DATABASE}::test_statement_timeout_fails_the_run_and_the_next_continues",
        _records_no_reason,
    ),
    Twin(
        "F8",
        "counts_rolled_back_rows",
        f"{_DATABASE}::test_row_that_stays_locked_fails_the_run_and_the_next_continues",
        _counts_rolled_back_rows,
    ),
    Twin(
        "F8",
        "restarts_after_an_unclosed_run",
        f"{_DATABASE}::test_locked_ledger_row_is_closed_by_the_next_run",
        _starts_over,
    ),
    Twin(
        "F8",
        "considers_no_run_dead",
        f"{_DATABASE}::test_no_free_connection_in_a_run_fails_it_and_the_next_continues",
        _considers_no_run_dead,
    ),
    Twin(
        "F8",
        "counts_rows_as_failed_on_a_read_only_server",
        f"{_DATABASE}::test_failover_to_a_read_only_server_fails_the_run_but_no_row",
        _counts_rows_as_failed_for_the_server,
    ),
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
        "F9",
        "treats_a_failed_git_as_done",
        f"{_GIT}::test_crash_of_git_loses_and_repeats_nothing",
        _treats_a_failed_git_as_done,
        slow=True,
    ),
    Twin(
        "F9",
        "fails_all_refs_with_a_locked_one",
        f"{_GIT}::test_locked_ref_fails_alone_and_other_refs_are_untouched",
        _fails_all_refs_with_one,
    ),
]
