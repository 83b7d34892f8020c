"""Sweeps of an application on a broker: sent, run, recorded and displayed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq import Broker
from flask.testing import FlaskClient
from prometheus_client import generate_latest

import housekeeping
from housekeeping import Settings, Sweep
from tests.declarations import changed
from tests.integration.middleware.applications import close_all, eventually, rows, working
from tests.integration.middleware.step_worker import close
from tests.integration.own_sweeps import shop
from tests.integration.own_sweeps.shop import Coupon, old_coupons, used_coupons
from tests.internals.brokers import message_broker
from tests.internals.core import DeclarationError, SettingsError, shared_redis
from tests.internals.database import Database, database
from tests.internals.doctor import examine
from tests.internals.engine import Finding, run_sweep
from tests.internals.insight import worker_status
from tests.internals.ledger import Run
from tests.internals.web import create_app
from tests.internals.workers import BUILT_IN, configured_sweeps

MODULE = shop.__name__


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis, postgres: Database) -> Iterator[Broker]:
    """Return an application's own broker."""
    broker = message_broker(settings)
    yield broker
    close(broker)
    if shared_redis.client is not None and shared_redis.client is not redis_client:
        shared_redis.client.close()
    close_all()
    database.initialize(postgres)


@pytest.fixture
def coupons(postgres: Database) -> None:
    postgres.create_tables([Coupon])
    now = datetime.now(UTC)
    for hours in (1, 2, 3):
        Coupon.create(state="open", expires_at=now - hours * timedelta(hours=1))
        Coupon.create(state="used", expires_at=now + hours * timedelta(hours=1))


def with_module(settings: Settings, **workers: Any) -> Settings:
    given = settings.model_dump(exclude={"sweeps", "workers"})
    return Settings.load(**given, sweeps=MODULE, workers=json.dumps(workers))


def test_sweep_runs_as_an_actor_of_an_applications_own_broker(broker: Any, settings: Settings, coupons: None) -> None:
    actors = housekeeping.install(broker, settings, workers=False, sweeps=[old_coupons])

    with working(broker):
        actors[old_coupons.name].send()
        eventually(lambda: [outcome for outcome, *_ in rows(old_coupons.name) if outcome])

    assert [(outcome, counts["expired"]) for outcome, _, _, counts in rows(old_coupons.name)] == [("done", 3)]
    assert Coupon.select().where(Coupon.state == "expired").count() == 3


@pytest.mark.parametrize("sweeps", [(), (old_coupons,)])
def test_installation_without_workers_removes_old_rows_of_the_ledger(
    broker: Any, settings: Settings, sweeps: Sequence[Sweep], postgres: Database
) -> None:
    actors = housekeeping.install(broker, settings, workers=False, sweeps=sweeps)
    old = datetime.now(UTC) - timedelta(days=31)
    Run.insert(
        worker="shop.old", trigger="cli", started_at=old, heartbeat_at=old, finished_at=old, outcome="done"
    ).execute()

    with working(broker):
        actors["housekeeping.old_runs"].send()
        eventually(lambda: [outcome for outcome, *_ in rows("housekeeping.old_runs") if outcome])

    assert not Run.select().where(Run.worker == "shop.old").exists()
    assert "periodic" in actors["housekeeping.old_runs"].options


def test_each_database_has_a_worker_that_removes_old_rows(broker: Broker, settings: Settings) -> None:
    several = settings.model_copy(update={"databases": {"ci": settings.require_database_url()}})

    actors = housekeeping.install(broker, several, workers=False)

    assert [*actors] == ["housekeeping.old_runs", "housekeeping.old_runs.ci"]


def test_configured_sweeps_are_installed_with_the_built_in_workers(broker: Broker, settings: Settings) -> None:
    actors = housekeeping.install(
        broker, with_module(settings, **{used_coupons.name: {"schedule": "7 3 * * *"}}), sweeps=[used_coupons]
    )

    assert {old_coupons.name, used_coupons.name} < set(actors)
    assert len(actors) == 2 + sum(len(family.SWEEPS) for family in BUILT_IN)
    assert "periodic" in actors[used_coupons.name].options


def test_sweeps_need_the_database(broker: Broker, settings: Settings) -> None:
    without = settings.model_copy(update={"database_url": None})

    with pytest.raises(SettingsError, match="HOUSEKEEPING_DATABASE_URL is not set"):
        housekeeping.install(broker, without, workers=False, sweeps=[old_coupons])


def test_duplicate_sweep_names_are_refused_before_any_registration(broker: Broker, settings: Settings) -> None:
    before, same_name = list(broker.middleware), changed(old_coupons, batch=7)

    with pytest.raises(DeclarationError, match="there is a sweep shop.old_coupons already"):
        housekeeping.install(broker, settings, workers=False, sweeps=[old_coupons, same_name])

    assert broker.middleware == before


def test_application_sweep_is_displayed_like_a_built_in_one(broker: Broker, settings: Settings, coupons: None) -> None:
    told = with_module(settings)
    sweep = configured_sweeps(told)[old_coupons.name]
    housekeeping.install(broker, told)
    client: FlaskClient = create_app(told, {sweep.name: sweep}, "t" * 16, open_to_read=True).test_client()

    seen = worker_status(sweep, datetime.now(UTC), told.timezone)
    pages = [client.get(path).get_data(as_text=True) for path in ("/", f"/workers/{sweep.name}")]

    assert (seen.state, str(seen.waiting)) == ("on", "3")
    assert all(sweep.name in page for page in pages)
    run_sweep(sweep)
    assert f'worker="{sweep.name}"' in generate_latest().decode()


@pytest.fixture
def found(settings: Settings, broker: Broker) -> Callable[[str], list[Finding]]:
    """Return the doctor's findings for one worker."""
    told = with_module(settings)
    return lambda worker: [each for each in examine(told, configured_sweeps(told)) if each.area == worker]


def test_doctor_names_a_missing_table(found: Callable[[str], list[Finding]]) -> None:
    findings = found(old_coupons.name)

    assert [(each.level, each.subject) for each in findings][:1] == [("error", "table coupon")]


def test_doctor_names_the_missing_index_of_a_query(
    found: Callable[[str], list[Finding]], coupons: None, postgres: Database, settings: Settings
) -> None:
    [before] = [each for each in found(old_coupons.name) if each.subject == "indexes"]
    assert before.way_out is not None
    postgres.execute_sql(before.way_out.replace("CONCURRENTLY ", ""))
    [after] = [each for each in found(old_coupons.name) if each.subject == "indexes"]

    assert (before.level, before.text) == ("warning", "the query of stage rows: the whole table is read")
    assert before.way_out == 'CREATE INDEX CONCURRENTLY ON "coupon" (expires_at, id) WHERE ("state" = \'open\')'
    assert after.level == "fine"


_MANY = """
from collections import Counter
from housekeeping import BaseModel, Delete, Rows, Sweep, UtcDateTimeField

called = Counter()


def declared(number):
    class Thing(BaseModel):
        expires_at = UtcDateTimeField()

        class Meta:
            table_name = f"things_{number}"

    def stale(row, now):
        called[number] += 1
        return row.expires_at <= now

    return Sweep(f"shop.things_{number}", Rows(Thing, stale=stale, order="expires_at", action=Delete()))


SWEEPS = tuple(map(declared, range(12)))
"""


def test_doctor_examines_each_sweep_once_however_many_there_are(
    settings: Settings, postgres: Database, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_of_many.py").write_text(_MANY)
    monkeypatch.syspath_prepend(tmp_path)
    from_module = Settings.load(**settings.model_dump(exclude={"sweeps", "workers"}), sweeps="shop_of_many")
    for number in range(12):
        postgres.execute_sql(f"CREATE TABLE things_{number} (id serial PRIMARY KEY, expires_at timestamptz NOT NULL)")
    sweeps = configured_sweeps(from_module)
    called = importlib.import_module("shop_of_many").called

    few, many = ([name for name in sweeps if name.startswith("shop.")][:count] for count in (2, 12))
    counts = []
    for names in (few, many):
        called.clear()
        texts = [each.text for each in examine(from_module, {name: sweeps[name] for name in names})]
        assert texts.count("exists, with all needed rights") == len(names)
        counts.append(called[0])

    assert 0 < counts[0] == counts[1]
