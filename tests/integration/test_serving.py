"""Service of an installation without Redis, in this process: which faults it outlives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest

from housekeeping import Delete, Row, Rows, Settings, Sweep
from tests.acceptance.processes import eventually
from tests.internals.app import Service, serve
from tests.internals.database import Database
from tests.internals.ledger import Run, TickRow
from tests.internals.sweeps import Setup, SetupProblem

#: Serves these sweeps within the block.
Serving = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def serving(postgres: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Serving:
    monkeypatch.setattr(serve, "_AGAIN_S", 0.1)
    postgres.execute_sql("CREATE TABLE entries (id bigint PRIMARY KEY, due boolean NOT NULL)")
    postgres.execute_sql("INSERT INTO entries VALUES (1, true)")

    @contextmanager
    def run(*sweeps: Sweep) -> Iterator[None]:
        service = Service(settings, {each.name: each for each in sweeps}, threads=2)
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            yield
        finally:
            service.stop()
            thread.join(60)
        assert not thread.is_alive()

    return run


def sweep(name: str, stale: Callable[[Row], object] = lambda row: row.due, **how: object) -> Sweep:
    rows = Rows("entries", stale=stale, order="id", action=Delete())
    return Sweep(name, rows, schedule="* * * * *", **how)  # type: ignore[arg-type]


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


def test_missing_migration_is_named_and_waited_for(
    serving: Serving, postgres: Database, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    # S3: such as after the restore of an old backup
    ledger = settings.schema_name
    postgres.execute_sql(f"ALTER TABLE {ledger}.ticks RENAME TO missing")
    postgres.execute_sql(f"UPDATE {ledger}.migrations SET version = -version")

    with serving(sweep("tests.expired")):
        eventually(lambda: any("run: housekeeping init" in str(vars(each).get("error")) for each in caplog.records))
        postgres.execute_sql(f"UPDATE {ledger}.migrations SET version = -version")
        postgres.execute_sql(f"ALTER TABLE {ledger}.missing RENAME TO ticks")
        eventually(lambda: outcomes("tests.expired") == ["done"])

    assert caplog.text.count("Ticks could not be checked; retrying") == 1


@pytest.mark.parametrize("most", [0, 1])
def test_failed_tick_is_retried_as_often_as_its_worker_says(
    serving: Serving, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    # R1
    def stale(row: Row) -> object:
        return row.missing

    with serving(sweep("tests.expired", stale, actor={"max_retries": most})):
        eventually(lambda: TickRow.select().where(TickRow.retries == 1).exists())

    assert (outcomes("tests.expired"), TickRow.get().due_at is None) == (["failed"], most == 0)
    assert ("Tick failed, no retries left" in caplog.text) == (most == 0)
