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
from housekeeping.sweeps.ledger import runs
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


def _says_nothing_of_why(patch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OperationalError("never asked")

    patch.setattr(runs, "fail", fail)


def _leaves_transactions_open(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peewee_database._Transaction, "_roll_back", lambda self: None)


def _takes_nobody_for_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "SILENCE", timedelta(days=10))


def _starts_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "_stopped_at", lambda *args: None)


def _blames_rows_for_the_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bisection, "_CANNOT_WRITE", "no such class")


def _waits_as_long_as_it_takes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(connection, "_SESSION", "-c timezone=UTC")


def _counts_what_was_rolled_back(patch: pytest.MonkeyPatch) -> None:
    commit = executor.Executor.commit

    def counting(self: executor.Executor, apply: Any, state: Any, record: Any) -> Any:
        try:
            return commit(self, apply, state, record)
        except OperationalError:
            state.counts["deleted_rows"] += 10
            raise

    patch.setattr(executor.Executor, "commit", counting)


def _believes_a_store_that_failed(patch: pytest.MonkeyPatch) -> None:
    in_bulk = Deletion._in_bulk
    patch.setattr(Deletion, "_in_bulk", lambda *args: in_bulk(*args) or True)


def _believes_a_git_that_failed(patch: pytest.MonkeyPatch) -> None:
    def delete_refs(
        deletion: RefDeletion, repository: PurePath, refs: Sequence[str], *args: Any
    ) -> Iterator[RefResult]:
        try:
            deletion.delete(repository, refs)
        except RefDeletionFailed:
            pass
        yield from ((ref, None) for ref in refs)

    patch.setattr(cleanup, "delete_refs", delete_refs)


def _gives_up_all_refs_for_one(patch: pytest.MonkeyPatch) -> None:
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
        "lets_the_next_transaction_commit_it",
        "tests/integration/database/test_connection.py::test_interrupt_at_the_end_of_a_transaction_leaves_none_open",
        _leaves_transactions_open,
    ),
    Twin(
        "F8",
        "says_nothing_of_why_a_run_failed",
        f"{_DATABASE}::test_statement_timeout_fails_the_run_and_the_next_continues",
        _says_nothing_of_why,
    ),
    Twin(
        "F8",
        "counts_what_was_rolled_back",
        f"{_DATABASE}::test_row_that_stays_locked_fails_the_run_and_the_next_continues",
        _counts_what_was_rolled_back,
    ),
    Twin(
        "F8",
        "starts_over_after_a_run_that_could_not_be_closed",
        f"{_DATABASE}::test_locked_ledger_row_is_closed_by_the_next_run",
        _starts_over,
    ),
    Twin(
        "F8",
        "takes_nobody_for_dead",
        f"{_DATABASE}::test_no_free_connection_in_a_run_fails_it_and_the_next_continues",
        _takes_nobody_for_dead,
    ),
    Twin(
        "F8",
        "blames_rows_for_a_read_only_server",
        f"{_DATABASE}::test_failover_to_a_read_only_server_fails_the_run_but_no_row",
        _blames_rows_for_the_server,
    ),
    Twin(
        "F8",
        "waits_as_long_as_it_takes",
        f"{_DATABASE}::test_session_timeouts_end_a_batch_before_its_run_counts_as_dead",
        _waits_as_long_as_it_takes,
    ),
    Twin(
        "F9",
        "believes_a_store_that_failed",
        f"{_STORE}::test_unconfirmed_deletions_are_settled_by_the_next_run",
        _believes_a_store_that_failed,
    ),
    Twin(
        "F9",
        "believes_a_git_that_failed",
        f"{_GIT}::test_crash_of_git_loses_and_repeats_nothing",
        _believes_a_git_that_failed,
        slow=True,
    ),
    Twin(
        "F9",
        "gives_up_all_refs_for_one_that_is_locked",
        f"{_GIT}::test_locked_ref_fails_alone_and_other_refs_are_untouched",
        _gives_up_all_refs_for_one,
    ),
]
