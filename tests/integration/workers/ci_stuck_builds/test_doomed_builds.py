"""Document 6, エラー処理: a build that cannot be dropped is doomed and fails alone; handlers within the transaction."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import events
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.database_times import DatabaseTimes
from tests.declarations import changed
from tests.integration.conftest import Locked
from tests.integration.statements import watch_statements
from tests.integration.workers.ci_stuck_builds.tables import STALE, AddBuilds, Refuse, by_status, lines
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.workers import drop_canceling
from tests.session_settings import set_in_session

#: Refuses to be dropped, not to be doomed.
UNDROPPABLE = "NEW.failure_reason IS DISTINCT FROM 12 AND OLD.id"
UNTOUCHABLE = "OLD.id"


def test_undroppable_build_is_doomed_at_the_time_of_its_batch(
    either: type[Build], add_builds: AddBuilds, refuse: Refuse, clock: ManualClock, times: DatabaseTimes
) -> None:
    # StandardError: doom!で代替処理
    add_builds(3, "canceling", STALE, STALE)
    refuse(f"{UNDROPPABLE} = 2")

    result = run_sweep(drop_canceling, clock=clock, on_batch=times.note)

    assert (result.outcome, result.counts) == (
        "done",
        {"dropped": 2, "doomed": 1, "failed": 0, "out_of_time": False},
    )
    doomed = Build.get(Build.id == 2)
    assert (doomed.status, doomed.failure_reason, doomed.lock_version) == ("failed", 12, 4)
    assert doomed.finished_at == doomed.updated_at
    # 1 in the first part, 2 in the next, 3 in the last.
    assert [times.batch_of(each.updated_at) for each in Build.select().order_by(Build.id)] == [0, 1, 2]


def test_error_of_a_doomed_build_is_reported_and_logged(
    builds: type[Build],
    add_builds: AddBuilds,
    refuse: Refuse,
    reported: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # 障害時対応 3: Sentryに報告; エラーログ: 例外情報、build詳細
    add_builds(20, "canceling", STALE, STALE)
    refuse(f"{UNDROPPABLE} = 7")

    run_sweep(drop_canceling, clock=ManualClock())

    about = {"build_id": 7, "build_name": "rspec 7", "build_stage": "test", "pipeline_id": 5007, "project_id": 7}
    (told,) = reported
    (line,) = lines(caplog, "Build could not be dropped and is doomed")
    assert {name: told[name] for name in about} == about
    assert "the pipeline is gone" in str(told["error"])
    assert {name: line[name] for name in about} == about
    assert (line["levelname"], line["error"]) == ("ERROR", "the pipeline is gone")


def test_doomed_build_has_the_line_of_a_drop(
    builds: type[Build], add_builds: AddBuilds, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    # 進捗ログ: ビルドdrop時. Build 2 is doomed; build 3 cannot be, and stays.
    caplog.set_level("INFO")
    add_builds(3, "canceling", STALE, STALE)
    refuse(f"{UNTOUCHABLE} = 3 OR {UNDROPPABLE} = 2")

    run_sweep(drop_canceling, clock=ManualClock())

    fields = ("levelname", "build_id", "runner_id", "status", "failure_reason")
    assert [tuple(line[name] for name in fields) for line in lines(caplog, "Dropping outdated build")] == [
        ("INFO", 1, 1, "canceling", "stuck_or_timeout_failure"),
        ("INFO", 2, 2, "canceling", "data_integrity_failure"),
    ]


def test_doomed_build_has_an_event_of_its_own(
    builds: type[Build],
    add_builds: AddBuilds,
    refuse: Refuse,
    heard: Callable[[], dict[str, list[dict[str, Any]]]],
) -> None:
    add_builds(3, "canceling", STALE, STALE)
    refuse(f"{UNDROPPABLE} = 2")

    run_sweep(drop_canceling, clock=ManualClock())

    rows = heard()
    dropped = {"project_id": 1, "pipeline_id": 5001, "failure_reason": 3}
    assert sorted(row["build_id"] for row in rows["build_dropped"]) == [1, 3]
    assert {"build_id": 1, **dropped} in rows["build_dropped"]
    assert rows["build_doomed"] == [{"build_id": 2, "project_id": 2, "pipeline_id": 5002, "failure_reason": 12}]


def test_build_with_a_damaged_version_is_doomed(builds: type[Build], add_builds: AddBuilds, clock: ManualClock) -> None:
    # The largest integer there is: lock_version + 1 is out of range, and the drop fails by itself.
    add_builds(2, "canceling", STALE, STALE, lock_version="2147483648 - n")

    result = run_sweep(drop_canceling, clock=clock)

    assert (result.counts["dropped"], result.counts["doomed"]) == (1, 1)
    assert Build.get(Build.id == 1).lock_version == 1


@pytest.mark.parametrize("meanwhile", ["status = 'success'", "updated_at = timestamp '2026-01-01'"])
def test_build_changed_before_its_doom_is_skipped(
    either: type[Build],
    add_builds: AddBuilds,
    refuse: Refuse,
    admin: Connection,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: str,
) -> None:
    # Only while it is still canceling.
    add_builds(2, "canceling", STALE, STALE)
    refuse("NEW.status = 'failed' AND NEW.failure_reason IS DISTINCT FROM 12 AND OLD.id = 2")
    table, changes = either._meta.table_name, itertools.count(1)

    def change_after_the_batch(sql: str) -> None:
        if "UPDATE" in sql and table in sql and next(changes) > 1:
            with admin.cursor() as cursor:
                cursor.execute(f"UPDATE {table} SET {meanwhile} WHERE id = 2")

    watch_statements(monkeypatch, change_after_the_batch)

    result = run_sweep(drop_canceling, clock=ManualClock())

    assert result.counts == {"dropped": 1, "doomed": 0, "failed": 0, "out_of_time": False}
    assert Build.get(Build.id == 2).failure_reason is None


def test_build_whose_drop_and_doom_are_undone_fails_and_is_not_doomed(
    either: type[Build], add_builds: AddBuilds, admin: Connection
) -> None:
    add_builds(3, "canceling", STALE, STALE)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION undo() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF OLD.id = 2 THEN NEW.status := OLD.status; END IF; RETURN NEW; END $$;"
            f"CREATE TRIGGER undo BEFORE UPDATE ON {either._meta.table_name} FOR EACH ROW EXECUTE FUNCTION undo()"
        )

    result = run_sweep(drop_canceling, clock=ManualClock())

    assert result.counts == {"dropped": 2, "doomed": 0, "failed": 1, "out_of_time": False}
    assert Build.get(Build.id == 2).lock_version == 3


def test_doom_prevented_by_a_trigger_is_a_failure(
    builds: type[Build], add_builds: AddBuilds, admin: Connection
) -> None:
    add_builds(1, "canceling", STALE, STALE)
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF NEW.failure_reason = 12 THEN RETURN NULL; END IF; RAISE EXCEPTION 'no'; END $$;"
            "CREATE TRIGGER swallow BEFORE UPDATE ON ci_builds FOR EACH ROW EXECUTE FUNCTION swallow()"
        )

    result = run_sweep(drop_canceling, clock=ManualClock())

    assert (result.outcome, result.counts["doomed"], result.counts["failed"]) == ("done", 0, 1)


def test_many_dooms_or_drops_raise_alerts(
    builds: type[Build], add_builds: AddBuilds, refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    # 監視・アラート: エラー件数, 削除ジョブ数; at the limit and one over it.
    few = dataclasses.replace(
        drop_canceling, alerts=dataclasses.replace(drop_canceling.alerts, most={"dropped": 3, "doomed": 2})
    )
    refuse(f"{UNDROPPABLE} >= 100")

    add_builds(3, "canceling", STALE, STALE)
    add_builds(2, "canceling", STALE, STALE, first_id=100)
    run_sweep(few, clock=ManualClock())
    at_the_limit = [line["alarm"] for line in lines(caplog, "Alert")]
    add_builds(4, "canceling", STALE, STALE, first_id=10)
    add_builds(3, "canceling", STALE, STALE, first_id=110)
    run_sweep(few, clock=ManualClock())

    assert at_the_limit == []
    assert [line["alarm"] for line in lines(caplog, "Alert")] == ["most_dropped", "most_doomed"]


@pytest.fixture
def pipelines(builds: type[Build], admin: Connection) -> None:
    """Pipelines, whose rows count their builds; a build that is doomed changes none."""
    with admin.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE pipelines (id bigint PRIMARY KEY, running integer DEFAULT 0);"
            "INSERT INTO pipelines SELECT generate_series(0, 19);"
            "CREATE FUNCTION count_builds() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "UPDATE pipelines SET running = running - 1 WHERE id = OLD.commit_id; RETURN NEW; END $$;"
            "CREATE TRIGGER count_builds BEFORE UPDATE ON ci_builds FOR EACH ROW "
            "WHEN (NEW.failure_reason IS DISTINCT FROM 12) EXECUTE FUNCTION count_builds()"
        )


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["lock_timeout = '200ms'", "statement_timeout = '1s'"])
def test_build_that_waits_for_a_lock_is_not_doomed(
    pipelines: None, add_builds: AddBuilds, locked: Locked, limit: str
) -> None:
    add_builds(40, "canceling", STALE, STALE, commit_id="n % 20")
    set_in_session(database, limit)

    with locked("UPDATE pipelines SET running = 1 WHERE id = 7"):
        first = run_sweep(drop_canceling, clock=ManualClock())
    second = run_sweep(drop_canceling, clock=ManualClock())

    assert (first.outcome, first.counts) == ("done", {"dropped": 38, "doomed": 0, "failed": 2, "out_of_time": False})
    assert (second.counts["dropped"], second.counts["doomed"], by_status()["failed"]) == (2, 0, list(range(1, 41)))


FOUR_A_BATCH = changed(drop_canceling, batch=4)


class Pipelines:
    """A handler that cannot cancel the pipeline of one build."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.told: list[int] = []

    def __call__(self, connection: Any, rows: list[dict[str, Any]], /, *, worker: str, run_id: int | None) -> None:
        if self.refused in {row["build_id"] for row in rows}:
            raise LookupError("the pipeline is gone")
        self.told += [row["build_id"] for row in rows]


@pytest.fixture
def dropped() -> Iterator[Pipelines]:
    handler = Pipelines(3)
    events.on(events.build_dropped, handler, within_transaction=True)
    yield handler
    events.off(events.build_dropped, handler)


@pytest.fixture
def doomed() -> Iterator[Pipelines]:
    handler = Pipelines(0)
    events.on(events.build_doomed, handler, within_transaction=True)
    yield handler
    events.off(events.build_doomed, handler)


def test_build_whose_handler_fails_is_doomed(
    builds: type[Build], add_builds: AddBuilds, dropped: Pipelines, doomed: Pipelines, reported: list[dict[str, Any]]
) -> None:
    add_builds(10, "canceling", STALE, STALE)

    result = run_sweep(FOUR_A_BATCH, clock=ManualClock())

    assert (result.outcome, result.counts["dropped"], result.counts["doomed"], result.counts["failed"]) == (
        "done",
        9,
        1,
        0,
    )
    assert doomed.told == [3] and Build.get_by_id(3).failure_reason == 12
    assert set(dropped.told) == {1, 2, *range(4, 11)}
    assert [about["build_id"] for about in reported] == [3]


def test_build_whose_doom_has_a_failing_handler_stays(
    builds: type[Build], add_builds: AddBuilds, dropped: Pipelines, doomed: Pipelines
) -> None:
    add_builds(10, "canceling", STALE, STALE)
    doomed.refused = 3

    result = run_sweep(FOUR_A_BATCH, clock=ManualClock())

    assert (result.counts["dropped"], result.counts["doomed"], result.counts["failed"]) == (9, 0, 1)
    assert Build.get_by_id(3).status == "canceling"
