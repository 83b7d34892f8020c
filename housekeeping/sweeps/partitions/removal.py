"""Removal of one partition: it is detached before the batch's transaction if possible, and dropped within it."""

from __future__ import annotations

from collections.abc import Callable

from peewee import IntegrityError, PeeweeException, ProgrammingError

from housekeeping.core.sanitize import error_line
from housekeeping.database.connection import database
from housekeeping.sweeps.partitions import detaching, marks
from housekeeping.sweeps.partitions.candidate import Candidate
from housekeeping.sweeps.partitions.candidates import Candidates
from housekeeping.sweeps.partitions.outcome import Outcome


class _Stays(Exception):
    """Rolls back the work on a partition that must stay."""


def detach_first(candidates: Candidates, candidate: Candidate, check: Callable[[], None]) -> None:
    """Mark the partition and detach it concurrently, or complete its detachment, in transactions of their own.

    Parameters:
      check: Raises if another run may have begun. It begins no detachment meanwhile.
    """
    table, partition, lock_timeout = candidates.table, candidate.partition, candidates.action.lock_timeout
    # Another session's detachment makes the attempt fail, and the next one looks again.
    if candidate.partition.pending or (candidate.attempts and candidate.is_pending()):
        with database.atomic(), detaching.waiting_at_most(lock_timeout):
            detaching.be_alone(table)
            check()
            marks.set_mark(candidates.worker, table, partition)
            detaching.finish_detaching(table, partition)
    else:
        with detaching.alone(table, lock_timeout):
            check()
            marks.set_mark(candidates.worker, table, partition)
            detaching.detach_concurrently(table, partition)
    candidate.is_detached = True


def remove(candidates: Candidates, candidate: Candidate) -> Outcome:
    """Drop or release the partition in the open transaction, after its rows were checked once more under a lock."""
    try:
        try:
            return _remove(candidates, candidate)
        except PeeweeException as error:
            if not (candidate.is_detached and detaching.is_referred(error)):
                raise
            return _remove(candidates, candidate, error_line(error))
    except _Stays as stays:
        return Outcome("stays", str(stays))
    except PeeweeException as error:
        return outcome_of(error, candidate)


def outcome_of(error: PeeweeException, candidate: Candidate) -> Outcome:
    """Return what an error says about the partition; raise it if it concerns the whole run."""
    if detaching.is_busy(error):
        return Outcome("busy", error_line(error))
    if detaching.is_gone(error):
        is_partition, _ = marks.current_comment(candidate.partition) or (None, None)
        if is_partition is not candidate.is_detached and is_partition is not None:
            raise error  # the partition is there; the predicate reads a table that is not
        return Outcome("gone", error_line(error))
    if detaching.is_referred(error):
        return Outcome("stays", error_line(error))
    raise error


def _remove(candidates: Candidates, candidate: Candidate, reason: str | None = None) -> Outcome:
    """Drop or release the partition in a savepoint, with a limit on each wait.

    Parameters:
      reason: Why a detached partition has to stay; None if its rows decide.

    Raises:
      _Stays: It stays as it is; what was locked has been released.
    """
    with database.atomic(), detaching.waiting_at_most(candidates.action.lock_timeout):
        return _remove_locked(candidates, candidate, reason)


def _remove_locked(candidates: Candidates, candidate: Candidate, reason: str | None) -> Outcome:
    table, partition = candidates.table, candidate.partition
    if candidates.keeping or candidate.is_detached:
        # Only this partition is locked while its rows are read.
        detaching.lock_against_writes(partition)
    else:
        detaching.lock_table(table)
    current = marks.current_comment(partition)
    if current is None:
        return Outcome("gone", "another session has dropped it")
    is_partition, comment = current
    if candidate.is_detached and (is_partition or marks.mark_of(comment) is None):
        return Outcome("gone", "its mark was removed, or it was attached again")
    reason = reason or candidates.reason_of_rows(candidate)
    if reason is None:
        if not candidate.is_detached:
            detaching.detach(table, partition)
        if not candidates.action.keep_table:
            return Outcome("dropped", freed=detaching.drop(partition))
        marks.remove_mark(partition.name, comment)
        return Outcome("detached")
    if not candidate.is_detached:
        raise _Stays(reason)
    _attach_again(candidates, candidate, reason)
    marks.remove_mark(partition.name, comment)
    return Outcome("attached", reason)


def _attach_again(candidates: Candidates, candidate: Candidate, reason: str) -> None:
    try:
        with database.atomic():
            detaching.attach(candidates.table, candidate.partition)
    except (ProgrammingError, IntegrityError) as error:
        # Its range has another partition by now, or rows in the DEFAULT partition.
        raise _Stays(f"{reason}, but it cannot be attached again: {error_line(error)}") from error
