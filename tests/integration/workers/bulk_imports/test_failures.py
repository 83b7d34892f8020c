"""Document 65, エラー処理, 障害時対応: rows that cannot be changed, and unavailable servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import redis
from dramatiq.brokers.stub import StubBroker

from housekeeping.core.errors import DatabaseUnavailable
from housekeeping.core.redis.client import shared_redis
from housekeeping.core.settings import Settings
from housekeeping.database.connection import Database, connect_to, database
from housekeeping.installation import install
from housekeeping.sweeps.engine.runner import run_sweep
from housekeeping.sweeps.ledger.models import Run
from housekeeping.testing import ManualClock
from housekeeping.workers.bulk_imports.worker import MAX_RUNTIME, sweep
from tests.integration.workers.bulk_imports.conftest import EACH, STALE, Tables
from tests.session_settings import set_in_session

SMALL = dataclasses.replace(sweep, batch_size=10, options={"page_size": 10, "log_records": True})
Lines = Callable[[str], list[dict[str, Any]]]


@pytest.mark.slow
def test_poison_import_among_10_000_fails_alone(
    tables: Tables, clock: ManualClock, reported: list[dict[str, Any]], lines: Lines
) -> None:
    # エラーケース一覧: a failed transition is logged, and the next record comes.
    tables.add_imports(10_000, f"{STALE} + interval '1 millisecond' * n")
    tables.refuse("bulk_imports", "OLD.id = 5005")

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["timed_out_imports"], result.counts["failed"]) == ("done", 9_999, 1)
    assert tables.do("SELECT id FROM bulk_imports WHERE status <> 3") == [(5005,)]
    assert [about["id"] for about in reported] == [5005]
    assert [(line["record"]["id"], line["error"]) for line in lines("Record rejected")] == [(5005, "not this one")]
    assert len(lines("BulkImport stale")) == 9_999


@pytest.mark.slow
def test_poison_tracker_fails_only_its_entity(
    tables: Tables, clock: ManualClock, reported: list[dict[str, Any]]
) -> None:
    tables.add_entities(10_000)
    tables.add_trackers(EACH, "1")
    tables.refuse("bulk_import_trackers", "OLD.bulk_import_entity_id = 5005")

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.counts["failed"]) == ("done", 1)
    assert (result.counts["timed_out_entities"], result.counts["timed_out_trackers"]) == (9_999, 9_999)
    assert tables.do("SELECT id FROM bulk_import_entities WHERE status <> 3") == [(5005,)]
    assert tables.trackers(5005) == [1]
    assert [about["id"] for about in reported] == [5005]


def test_poison_row_is_tried_once_per_run_and_raises_an_alert(tables: Tables, clock: ManualClock, lines: Lines) -> None:
    # 監視・アラート, エラー件数: no limit of its own; every failed row raises an alert.
    tables.add_imports(25)
    tables.refuse("bulk_imports", "OLD.id = 1")

    first = run_sweep(SMALL, clock=clock)
    second = run_sweep(SMALL, clock=clock)

    assert (first.counts["timed_out_imports"], first.counts["failed"]) == (24, 1)
    assert (second.outcome, second.counts["timed_out_imports"], second.counts["failed"]) == ("done", 0, 1)
    assert [line["alarm"] for line in lines("Alert")] == ["failed_rows"] * 2


@pytest.mark.slow
def test_unchangeable_rows_do_not_use_up_every_run(tables: Tables) -> None:
    # document 65: a poison row is not the first one in every run. Each run has time for three pages.
    tables.add_imports(60, f"{STALE} + interval '1 second' * n")
    tables.add_entities(1)
    tables.refuse("bulk_imports", "OLD.id <= 50")
    short = MAX_RUNTIME / 2

    runs = [run_sweep(SMALL, clock=ManualClock(tick=short)) for _ in range(5)]

    assert [run.outcome for run in runs[:2]] == ["failed", "failed"], "20 rows in a row failed alike"
    assert sum(run.counts["timed_out_imports"] for run in runs) == 10
    assert sum(run.counts["timed_out_entities"] for run in runs) == 1


@pytest.mark.slow
def test_unchangeable_imports_do_not_block_entities(tables: Tables, clock: ManualClock) -> None:
    tables.add_imports(30)
    tables.add_entities(30)
    tables.refuse("bulk_imports", "true")

    result = run_sweep(SMALL, clock=clock)

    assert (result.outcome, result.counts["timed_out_imports"], result.counts["failed"]) == ("failed", 0, 20)
    assert result.counts["timed_out_entities"] == 30


def test_lost_connection_keeps_counts_and_the_next_run_resumes(
    tables: Tables, clock: ManualClock, last_run: Callable[[], Run]
) -> None:
    # エラーケース一覧: database connection error -> retry. Cut in the third batch, between entity and tracker.
    tables.add_entities(50)
    tables.add_trackers(EACH, "1")
    tables.refuse("bulk_import_trackers", "OLD.bulk_import_entity_id = 25", doing=_CUT)

    broken = run_sweep(SMALL, clock=clock)
    in_between = (tables.entities()[25], tables.trackers(25))
    row = last_run()
    tables.do("DROP TRIGGER refuse ON bulk_import_trackers")
    again = run_sweep(SMALL, clock=clock)

    assert broken.outcome == "failed" and broken.reason is not None and broken.reason.startswith("database: ")
    assert (broken.counts["timed_out_entities"], broken.counts["timed_out_trackers"]) == (20, 20)
    assert (row.outcome, row.counts["timed_out_entities"]) == ("failed", 20)
    assert in_between == (1, [1]), "either both or none"
    assert (again.outcome, again.counts["timed_out_entities"], again.counts["timed_out_trackers"]) == ("done", 30, 30)


_CUT = "PERFORM pg_terminate_backend(pg_backend_pid())"


def test_database_outage_fails_the_run_with_a_reason(settings: Settings, clock: ManualClock) -> None:
    # リトライ対象エラー
    database.initialize(connect_to("postgresql://nobody@127.0.0.1:1/nowhere"))

    result = run_sweep(sweep, clock=clock)

    assert (result.outcome, result.run_id) == ("failed", None)
    assert result.reason is not None and "127.0.0.1" in result.reason
    with pytest.raises(DatabaseUnavailable):
        result.raise_for_failure()
    database.initialize(None)


def test_a_run_needs_no_redis(tables: Tables, clock: ManualClock) -> None:
    # No lease: the document excludes nothing but by the states. A run that has begun ends without Redis.
    tables.add_imports(1)
    away = redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=0.1)
    shared_redis.use(away, "nowhere")

    try:
        result = run_sweep(sweep, clock=clock)
    finally:
        shared_redis.client = None
        away.close()

    assert (result.outcome, result.counts["timed_out_imports"]) == ("done", 1)


def test_a_missing_table_fails_the_run_and_names_it(postgres: Database, clock: ManualClock) -> None:
    result = run_sweep(sweep, clock=clock)

    assert result.outcome == "failed"
    assert result.reason is not None and "bulk_imports" in result.reason


def test_the_actor_is_retried_25_times_and_takes_no_argument(settings: Settings, redis_client: redis.Redis) -> None:
    # リトライ仕様, 入力パラメータ, 障害時対応 (idempotent!), 備考 (data_consistency)
    actor = install(StubBroker(middleware=[]), settings)[sweep.name]

    assert (actor.queue_name, actor.options["max_retries"]) == ("cronjob", 25)
    assert actor.options["idempotent"] is True
    assert (actor.options["feature_category"], actor.options["data_consistency"]) == ("importers", "sticky")
    with pytest.raises(TypeError):
        actor.fn(1)
    database.initialize(None)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["bulk_import_entities", "bulk_import_trackers"])
def test_entity_too_slow_to_change_fails_alone_with_its_trackers(
    tables: Tables, clock: ManualClock, table: str
) -> None:
    tables.add_entities(15)
    tables.add_trackers(EACH, "0, 1")
    slow = "OLD.id" if table == "bulk_import_entities" else "OLD.bulk_import_entity_id"
    tables.refuse(table, f"{slow} = 8", "PERFORM pg_sleep(60)")
    set_in_session(database, "statement_timeout = '1s'")

    result = run_sweep(SMALL, clock=clock)

    assert (result.outcome, result.counts["timed_out_entities"], result.counts["timed_out_trackers"]) == (
        "done",
        14,
        28,
    )
    assert (result.counts["failed"], tables.entities()[8], tables.trackers(8)) == (1, 1, [0, 1])
