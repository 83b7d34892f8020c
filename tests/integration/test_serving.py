"""Faults of a service without Redis, which runs in the process of the tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import dramatiq
import pytest

from housekeeping import Delete, Row, Rows, Settings, Sweep
from tests.acceptance.processes import eventually
from tests.integration.own_stages import in_transactions
from tests.internals.app import Service, serve
from tests.internals.brokers import Requeue
from tests.internals.database import Database
from tests.internals.ledger import NOW, Run, TickRow
from tests.internals.sweeps import Setup, SetupProblem

#: Serves these sweeps within the block.
Serving = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def serving(postgres: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Serving:
    monkeypatch.setattr(serve, "_AGAIN_S", 0.1)
    postgres.execute_sql("CREATE TABLE entries (id bigint PRIMARY KEY, due boolean NOT NULL)")
    postgres.execute_sql("INSERT INTO entries VALUES (1, true)")

    @contextmanager
    def run(*sweeps: Sweep, threads: int = 2, catch_up: str = "latest") -> Iterator[None]:
        given = settings.model_copy(update={"catch_up": catch_up})
        service = Service(given, {each.name: each for each in sweeps}, threads)
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            yield
        finally:
            service.stop()
            thread.join(60)
        assert not thread.is_alive()

    return run


def sweep(name: str, stale: Callable[[Row], object] = lambda row: row.due, *, missed: int = 0, **how: Any) -> Sweep:
    """Declare a worker with one tick that is half an hour late, after this many missed ones."""
    tick = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=30)
    TickRow.insert(worker=name, tick=tick - timedelta(hours=1 + missed), message_id="before").execute()
    rows = Rows(how.pop("table", "entries"), stale=stale, order="id", action=Delete())
    return Sweep(name, rows, schedule=f"{tick.minute} * * * *", **how)


def outcomes(worker: str) -> list[str | None]:
    return [run.outcome for run in Run.select().where(Run.worker == worker)]


def test_worker_whose_check_fails_keeps_no_other_one_from_its_ticks(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    # S3
    def check() -> SetupProblem:
        raise KeyError("a bug of the application")

    broken = replace(sweep("tests.broken"), setup=Setup(problem=check))

    with serving(broken, sweep("tests.expired")):
        eventually(lambda: outcomes("tests.expired") == ["done"])

    assert "Ticks could not be checked; retrying" in caplog.text


def test_tick_runs_while_those_of_other_workers_are_sent(serving: Serving) -> None:
    def check() -> None:
        eventually(lambda: outcomes("tests.expired") == ["done"])

    slow = replace(sweep("tests.slow"), setup=Setup(problem=check))

    with serving(sweep("tests.expired"), slow):
        eventually(lambda: outcomes("tests.slow") != [])


def test_database_that_hangs_keeps_no_worker_of_another_from_its_ticks(serving: Serving) -> None:
    # S3
    hangs, answered = threading.Event(), threading.Event()

    def check() -> SetupProblem:
        hangs.set()
        answered.wait()
        return SetupProblem("unknown", "it hung")

    hanging = replace(sweep("tests.hanging", database="hanging"), setup=Setup(problem=check))
    expired, before = sweep("tests.expired"), TickRow.get(TickRow.worker == "tests.expired")
    tick = before.tick + timedelta(hours=1)
    TickRow.insert(worker=before.worker, tick=tick, message_id="due", due_at=NOW + timedelta(hours=1)).execute()

    with serving(hanging, expired):
        try:
            assert hangs.wait(60)
            TickRow.update(due_at=NOW).where(TickRow.message_id == "due").execute()
            eventually(lambda: outcomes("tests.expired") == ["done"])
        finally:
            answered.set()


def test_old_tick_of_a_removed_worker_is_deleted(serving: Serving) -> None:
    due_at = NOW - timedelta(days=31)
    TickRow.insert(worker="tests.removed", tick=datetime.now(UTC), message_id="old", due_at=due_at).execute()

    with serving(sweep("tests.expired")):
        eventually(lambda: not TickRow.select().where(TickRow.message_id == "old").exists())


def test_missing_migration_is_named_and_waited_for(
    serving: Serving, postgres: Database, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    # S3: such as after the restore of an old backup
    ledger, expired = settings.schema_name, sweep("tests.expired")
    postgres.execute_sql(f"ALTER TABLE {ledger}.ticks RENAME TO missing")
    postgres.execute_sql(f"UPDATE {ledger}.migrations SET version = -version")

    with serving(expired):
        eventually(lambda: any("run: housekeeping init" in str(vars(each).get("error")) for each in caplog.records))
        postgres.execute_sql(f"UPDATE {ledger}.migrations SET version = -version")
        postgres.execute_sql(f"ALTER TABLE {ledger}.missing RENAME TO ticks")
        eventually(lambda: outcomes("tests.expired") == ["done"])

    assert caplog.text.count("Ticks could not be checked; retrying") == 1


@pytest.mark.parametrize(
    ("options", "error", "ends"),
    [
        ({"max_retries": 0}, KeyError(), True),
        ({"max_retries": 1}, KeyError(), False),
        ({"throws": KeyError}, KeyError(), True),
        ({"retry_when": lambda retries, error: 1 / 0}, KeyError(), True),
        ({"min_backoff": 7_200_000, "max_backoff": 7_200_000}, KeyError(), False),
        ({}, dramatiq.Retry(delay=7_200_000), False),
        ({"max_retries": 0}, Requeue("waits", timedelta(hours=2)), False),
    ],
    ids=["no_retry", "one_retry", "throws", "broken_retry_when", "backoff", "delay_of_the_error", "requeued"],
)
def test_failed_tick_is_retried_as_its_worker_says(
    serving: Serving, caplog: pytest.LogCaptureFixture, options: dict[str, Any], error: Exception, ends: bool
) -> None:
    # R1
    def fail() -> None:
        raise error

    with serving(in_transactions(sweep("tests.expired", actor=options), fail)):
        eventually(lambda: TickRow.select().where((TickRow.attempts == 1) & TickRow.holder.is_null()).exists())

    row = TickRow.get(TickRow.attempts == 1)
    assert (outcomes("tests.expired"), row.due_at is None) == (["failed"], ends)
    assert row.retries == (0 if isinstance(error, Requeue) else 1)
    assert ("Tick failed, no retries left" in caplog.text) == ends
    if not ends and options != {"max_retries": 1}:
        assert row.due_at > datetime.now(UTC) + timedelta(minutes=59)


@pytest.mark.parametrize(("catch_up", "missed", "ended"), [("latest", 2, ["missed", "done"]), ("none", 3, ["missed"])])
def test_outage_is_caught_up_as_the_setting_says(
    serving: Serving, catch_up: str, missed: int, ended: list[str]
) -> None:
    # S4, S5
    with serving(sweep("tests.expired", missed=2), catch_up=catch_up):
        eventually(lambda: outcomes("tests.expired") == ended)

    assert Run.get(Run.outcome == "missed").counts == {"missed": missed}


@pytest.mark.parametrize("threads", [1, 2])
def test_hanging_run_is_interrupted_and_only_then_its_thread_runs_the_next_one(
    serving: Serving,
    postgres: Database,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    threads: int,
) -> None:
    monkeypatch.setattr(
        serve, "time_limit_of", lambda each: timedelta(seconds=0.5 if each.name == "tests.hanging" else 600)
    )
    postgres.execute_sql("CREATE TABLE locked (id bigint PRIMARY KEY, due boolean NOT NULL)")
    postgres.execute_sql("INSERT INTO locked VALUES (1, true)")
    postgres.execute_sql(
        "CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(25); RETURN OLD; END $$"
    )
    postgres.execute_sql("CREATE TRIGGER hang BEFORE DELETE ON locked FOR EACH ROW EXECUTE FUNCTION hang()")

    with serving(sweep("tests.hanging", table="locked"), sweep("tests.expired"), threads=threads):
        eventually(lambda: outcomes("tests.expired") == ["done"] and outcomes("tests.hanging") == ["failed"])

    assert "Run interrupted" in caplog.text
    tick = TickRow.get(TickRow.worker == "tests.hanging")
    assert (tick.attempts, tick.retries) == (1, 1)
    hanging, expired = (Run.get(Run.worker == name) for name in ("tests.hanging", "tests.expired"))
    assert (expired.started_at > hanging.finished_at) == (threads == 1)
