from __future__ import annotations

from datetime import UTC, datetime, timedelta

from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.leases import LeaseRow
from tests.internals.ledger import PREDICATE, ActionRow, Completion, Rejection, Run
from tests.internals.workers import old_runs_sweep as sweep


def test_finished_runs_are_deleted_after_30_days(postgres: Database, admin: Connection, settings: Settings) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    limit = now - timedelta(days=30)
    instant = timedelta(microseconds=1)
    with admin.cursor() as cursor:
        for finished_at in (limit - instant, limit, limit + instant, None):
            cursor.execute(
                f"INSERT INTO {settings.schema_name}.runs (worker, trigger, started_at, finished_at, outcome) "
                "VALUES ('x', 'cli', %s, %s, %s)",
                (limit - timedelta(days=1), finished_at, "done" if finished_at else None),
            )

    result = run_sweep(sweep, clock=ManualClock(now))

    assert result.counts["deleted_rows"] == 1
    kept = [run.finished_at for run in Run.select().where(Run.worker == "x").order_by(Run.id)]
    assert kept == [limit, limit + instant, None]


def test_last_fingerprint_of_each_worker_is_kept(postgres: Database) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    for worker, predicate, days in (("a", "1", 40), ("a", "2", 35), ("a", None, 34), ("b", "1", 31), ("b", "2", 1)):
        at = now - timedelta(days=days)
        times = {"started_at": at, "heartbeat_at": at, "finished_at": at}
        counts = {} if predicate is None else {PREDICATE: predicate}
        Run.create(worker=worker, trigger="cli", outcome="done", counts=counts, **times)

    run_sweep(sweep, clock=ManualClock(now))

    kept = [
        (run.worker, run.counts[PREDICATE]) for run in Run.select().where(Run.worker.in_(["a", "b"])).order_by(Run.id)
    ]
    assert kept == [("a", "2"), ("b", "2")]


def test_unused_leases_are_deleted_after_30_days(postgres: Database, admin: Connection, settings: Settings) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    limit = now - timedelta(days=30)
    instant = timedelta(microseconds=1)
    leases = {"long_unused": -instant, "at_the_limit": timedelta(), "in_use": instant, "of_an_open_run": -instant}
    with admin.cursor() as cursor:
        for key, beside in leases.items():
            cursor.execute(
                f"INSERT INTO {settings.schema_name}.leases (key, holder, used_at) VALUES (%s, '', %s) RETURNING epoch",
                (key, limit + beside),
            )
            epoch = cursor.fetchone()
        cursor.execute(
            f"INSERT INTO {settings.schema_name}.runs (worker, trigger, epoch) VALUES ('x', 'cli', %s)", epoch
        )

    result = run_sweep(sweep, clock=ManualClock(now))

    assert result.counts["deleted_leases"] == 1
    kept = {lease.key for lease in LeaseRow.select()}
    assert kept >= leases.keys() - {"long_unused"}
    assert "long_unused" not in kept


def test_age_limit_of_runs_does_not_affect_leases(postgres: Database, admin: Connection, settings: Settings) -> None:
    # A shorter one would fence off holders that live.
    now = datetime(2026, 6, 1, tzinfo=UTC)
    with admin.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {settings.schema_name}.leases (key, holder, used_at) VALUES ('held', '', %s)",
            (now - timedelta(hours=2),),
        )

    result = run_sweep(changed(sweep, age=timedelta(hours=1)), clock=ManualClock(now))

    assert result.counts["deleted_leases"] == 0


def test_rejections_are_deleted_after_30_days(postgres: Database) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    instant = timedelta(microseconds=1)
    for number, beside in enumerate((-instant, timedelta(), instant)):
        last_at = now - timedelta(days=30) + beside
        Rejection.create(
            worker="x", subject="", cause=str(number), since=last_at, last_at=last_at, rows=1, times=0, sample={}
        )

    result = run_sweep(sweep, clock=ManualClock(now))

    assert result.counts["deleted_rejections"] == 1
    assert sorted(row.cause for row in Rejection.select()) == ["1", "2"]


def test_actions_are_deleted_after_a_year(postgres: Database) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    limit, instant = now - timedelta(days=365), timedelta(microseconds=1)
    for at in (limit - instant, limit, limit + instant):
        ActionRow.create(at=at, user="kim", action="pause", target="w", result="done")

    result = run_sweep(sweep, clock=ManualClock(now))

    assert result.counts["deleted_actions"] == 1
    assert [row.at for row in ActionRow.select().order_by(ActionRow.at)] == [limit, limit + instant]


def test_completions_are_deleted_when_they_expire(postgres: Database) -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    instant = timedelta(microseconds=1)
    for expires_at in (now - instant, now, now + instant):
        Completion.insert(name=str(expires_at), message_id="m", expires_at=expires_at).execute()

    result = run_sweep(sweep, clock=ManualClock(now))

    assert result.counts["deleted_completions"] == 1
    assert [row.expires_at for row in Completion.select().order_by(Completion.expires_at)] == [now, now + instant]
