"""Firing events on single records: compare-and-set, in the database and in the object."""

from __future__ import annotations

from enum import IntEnum

import pytest
from peewee import BigIntegerField, CompositeKey, DatabaseError, IntegerField, SmallIntegerField, TextField

from housekeeping import BaseModel, StateMachine
from tests.integration.conftest import Do
from tests.integration.statements import watch_statements
from tests.internals.core import IllegalEvent, RecordChanged
from tests.internals.database import CONFLICT_RETRIES, Database


class State(IntEnum):
    WAITING = 0
    RUNNING = 1
    DONE = 2
    FAILED = -1


class Job(BaseModel):
    """With a key of two columns, as partitioned tables have it."""

    id = BigIntegerField()
    part = IntegerField()
    status = SmallIntegerField()
    note = TextField(default="")
    lock_version = IntegerField(default=0)

    class Meta:
        primary_key = CompositeKey("id", "part")
        only_save_dirty = True


MACHINE = StateMachine(
    Job.status,
    State,
    {
        "start": ([State.WAITING], State.RUNNING),
        "finish": ([State.RUNNING], State.DONE),
        "fail": (list(State), State.FAILED),
    },
    final=(State.DONE, State.FAILED),
)


@pytest.fixture
def job(postgres: Database) -> Job:
    """A waiting job; another row has its id in another part."""
    postgres.create_tables([Job])
    Job.create(id=1, part=2, status=State.WAITING)
    return Job.create(id=1, part=1, status=State.WAITING)


def row(part: int = 1) -> tuple[int, str, int]:
    found = Job.get((Job.id == 1) & (Job.part == part))
    return found.status, found.note, found.lock_version


def test_an_event_moves_the_record_in_database_and_object_and_no_other(job: Job) -> None:
    MACHINE.fire(job, "start", {Job.note: "began"})

    assert (job.status, job.note) == (State.RUNNING, "began")
    assert row() == (1, "began", 0)
    assert row(part=2) == (0, "", 0)


def test_an_illegal_event_names_record_state_and_event_and_changes_nothing(job: Job) -> None:
    with pytest.raises(IllegalEvent, match=r"^Job \(1, 1\) is waiting: finish is allowed from running only$"):
        MACHINE.fire(job, "finish", {Job.note: "ended"})

    assert (job.status, job.note, row()) == (State.WAITING, "", (0, "", 0))


def test_event_on_a_changed_record_is_retried_from_its_new_state(job: Job, do: Do) -> None:
    do("UPDATE job SET status = 1, note = 'by others' WHERE part = 1")
    stale = job

    with pytest.raises(IllegalEvent, match="is running: start is allowed from waiting only"):
        MACHINE.fire(stale, "start", {})

    assert (stale.status, stale.note) == (State.RUNNING, "by others"), "the object is as the database has it"
    MACHINE.fire(stale, "finish", {})
    assert row()[0] == State.DONE


@pytest.mark.parametrize("end", [State.DONE, State.FAILED])
def test_event_does_not_move_a_record_that_others_finished(job: Job, do: Do, end: State) -> None:
    do(f"UPDATE job SET status = {end.value} WHERE part = 1")

    with pytest.raises(RecordChanged, match=f"became {end.name.lower()} during fail"):
        MACHINE.fire(job, "fail", {Job.note: "too late"})

    assert (row(), job.status) == ((end, "", 0), end)


def test_event_from_a_final_state_that_was_read_is_allowed(job: Job, do: Do) -> None:
    do("UPDATE job SET status = 2 WHERE part = 1")
    seen = Job.get((Job.id == 1) & (Job.part == 1))

    MACHINE.fire(seen, "fail", {})

    assert row()[0] == State.FAILED


def test_with_a_version_any_change_by_others_is_a_conflict_and_tried_again(job: Job, do: Do) -> None:
    do("UPDATE job SET lock_version = 5, note = 'by others' WHERE part = 1")

    MACHINE.fire(job, "start", {}, version=Job.lock_version)

    assert row() == (1, "by others", 6)
    assert (job.note, job.lock_version) == ("by others", 6)


@pytest.mark.parametrize(("conflicts", "moved"), [(CONFLICT_RETRIES, True), (CONFLICT_RETRIES + 1, False)])
def test_event_is_retried_three_times(
    job: Job, do: Do, monkeypatch: pytest.MonkeyPatch, conflicts: int, moved: bool
) -> None:
    left = [conflicts]

    def change_first(sql: str) -> None:
        if sql.startswith("UPDATE") and left[0]:
            left[0] -= 1
            do("UPDATE job SET lock_version = lock_version + 1 WHERE part = 1")

    watch_statements(monkeypatch, change_first)
    outcome = "moved"
    try:
        MACHINE.fire(job, "start", {}, version=Job.lock_version)
    except RecordChanged as error:
        outcome = str(error)

    assert outcome == ("moved" if moved else "Job (1, 1) was changed by others at every try of start")
    assert row()[0] == (State.RUNNING if moved else State.WAITING)


def test_event_on_a_deleted_record_raises(job: Job, do: Do) -> None:
    do("DELETE FROM job")

    with pytest.raises(RecordChanged, match=r"Job \(1, 1\) was deleted"):
        MACHINE.fire(job, "start", {})


def test_within_transaction_commits_with_the_record_or_not_at_all(job: Job) -> None:
    def along() -> None:
        Job.update(note="along").where(Job.part == 2).execute()
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        MACHINE.fire(job, "start", {}, within_transaction=along)

    assert (row(), row(part=2), job.status) == ((0, "", 0), (0, "", 0), State.WAITING)


def test_within_transaction_is_not_called_if_the_record_stays(job: Job, do: Do) -> None:
    do("UPDATE job SET status = 2 WHERE part = 1")
    called: list[bool] = []

    with pytest.raises(IllegalEvent):
        MACHINE.fire(job, "start", {}, within_transaction=lambda: called.append(True))

    assert called == []


def test_an_error_of_the_database_changes_neither_row_nor_object(job: Job, do: Do) -> None:
    do("ALTER TABLE job ADD CHECK (status <> 1)")

    with pytest.raises(DatabaseError):
        MACHINE.fire(job, "start", {})

    assert (row()[0], job.status) == (State.WAITING, State.WAITING)


def test_saving_another_column_later_does_not_bring_the_old_state_back(job: Job, do: Do) -> None:
    job = Job.get((Job.id == 1) & (Job.part == 1))
    MACHINE.fire(job, "start", {})
    do("UPDATE job SET status = 2 WHERE part = 1")

    job.note = "mine"
    job.save()

    assert row()[:2] == (State.DONE, "mine")


def test_unknown_state_allows_no_event(job: Job, do: Do) -> None:
    do("UPDATE job SET status = 9 WHERE part = 1")
    unknown = Job.get((Job.id == 1) & (Job.part == 1))

    with pytest.raises(IllegalEvent, match="is 9: fail is allowed from"):
        MACHINE.fire(unknown, "fail", {})
