"""Document 65, エラー処理, 障害時対応: rows that cannot be changed, and unavailable servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from dramatiq.brokers.stub import StubBroker

from housekeeping import Settings, install
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.workers.bulk_imports.conftest import EACH, Tables
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.workers import imports_sweep as sweep

SMALL = changed(sweep, batch=10, options={"page_size": 10, "log_records": True})
Lines = Callable[[str], list[dict[str, Any]]]


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


def test_the_actor_is_retried_25_times_and_takes_no_argument(settings: Settings, redis_client: redis.Redis) -> None:
    # リトライ仕様, 入力パラメータ, 障害時対応 (idempotent!), 備考 (data_consistency)
    actor = install(StubBroker(middleware=[]), settings)[sweep.name]

    assert (actor.queue_name, actor.options["max_retries"]) == ("cronjob", 25)
    assert actor.options["idempotent"] is True
    assert (actor.options["feature_category"], actor.options["data_consistency"]) == ("importers", "sticky")
    with pytest.raises(TypeError):
        actor.fn(1)
    database.initialize(None)
