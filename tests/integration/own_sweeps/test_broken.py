"""Broken sweeps of an application, which affect no other sweep's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any, Final
from zoneinfo import ZoneInfo

import pytest
import redis
from peewee import BigAutoField, DateTimeField, fn
from rich.console import Console

from housekeeping import BaseModel, Delete, Rows, Settings, Sweep, UtcDateTimeField
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.internals.cli import workers_table
from tests.internals.core import DeclarationError, SchemaMissing
from tests.internals.database import ClockSkew, Database, restore_declared_key
from tests.internals.doctor import stages, tables, tables_of, users_by_table
from tests.internals.engine import declared_by, run_sweep
from tests.internals.insight import forecast_now, plan, translate_table_errors, worker_status
from tests.internals.ledger import NOW, Run
from tests.internals.web import create_app
from tests.internals.workers import configured_sweeps


class Basket(BaseModel):
    id = BigAutoField()
    touched_at = UtcDateTimeField()


class Nowhere(BaseModel):
    id = BigAutoField()
    touched_at = UtcDateTimeField()


def sweep(name: str, stale: Callable[[Any, Any], Any], model: Any = Basket) -> Sweep:
    return Sweep(name, Rows(model, stale=stale, order="touched_at", action=Delete()))


def raises(row: Any, now: datetime) -> Any:
    raise LookupError("no limit is set")


def mistyped(row: Any, now: datetime) -> Any:
    model: Any = Basket
    return model.toched_at < now


class Misspelled(BaseModel):
    id = BigAutoField()
    tuched_at = UtcDateTimeField()
    touched_at = UtcDateTimeField()

    class Meta:
        table_name = "basket"


WHOLE: Final = sweep("shop.whole", lambda row, now: row.touched_at < now)
#: Broken sweeps with their error texts.
BROKEN: Final = [
    (
        sweep("shop.mistyped", mistyped),
        "stale fails: AttributeError: type object 'Basket' has no attribute 'toched_at'",
    ),
    (sweep("shop.raises", raises), "stale fails: LookupError: no limit is set"),
    (sweep("shop.added", lambda row, now: row.touched_at < now - 14), "stale fails: TypeError: unsupported operand"),
    (sweep("shop.sql", lambda row, now: (row.touched_at < now) & fn.LOWER(row.id)), "function lower(bigint) does not"),
    (sweep("shop.divides", lambda row, now: (row.touched_at < now) & (row.id / 0 > 1)), "division by zero"),
    (sweep("shop.nowhere", lambda row, now: row.touched_at < now, Nowhere), 'relation "nowhere" does not exist'),
]
PARTS: Final = (tables.examine_columns, stages.examine_stages)
EACH: Final = pytest.mark.parametrize(("broken", "said"), BROKEN, ids=[broken.name for broken, _ in BROKEN])


@pytest.fixture
def baskets(postgres: Database) -> None:
    postgres.create_tables([Basket])
    Basket.create(touched_at=datetime.now(UTC) - timedelta(days=1))


def unseen(broken: Sweep) -> list[str]:
    return [alarm.text for alarm in worker_status(broken, datetime.now(UTC), ZoneInfo("UTC")).alarms]


@EACH
def test_run_of_a_broken_sweep_fails_with_its_reason(baskets: None, broken: Sweep, said: str) -> None:
    result = run_sweep(broken)

    assert (result.outcome, Basket.select().count()) == ("failed", 1)
    assert said in str(result.reason)
    assert any(said in text for text in unseen(broken))


@EACH
def test_doctor_examines_the_sweeps_beside_a_broken_one(
    baskets: None, settings: Settings, broken: Sweep, said: str
) -> None:
    sweeps = {each.name: each for each in (broken, WHOLE)}

    found = [finding for part in PARTS for finding in part(settings, sweeps)]

    texts = [finding.text for finding in found if finding.area == broken.name]
    assert any(said in text for text in texts) or broken.name == "shop.divides"  # fails only in its run
    assert any(finding.area == WHOLE.name and finding.subject == "indexes" for finding in found)


def test_dashboard_shows_the_sweeps_beside_broken_ones(
    baskets: None, settings: Settings, redis_client: redis.Redis
) -> None:
    sweeps = {each.name: each for each in (*(broken for broken, _ in BROKEN), WHOLE)}
    client = create_app(settings, sweeps, "t" * 16, open_to_read=True).test_client()

    page = client.get("/").get_data(as_text=True)

    assert all(name in page for name in sweeps)
    assert page.count("the backlog cannot be counted") == len(BROKEN)


def test_oldest_row_of_a_column_without_a_zone_is_shown_with_its_age(postgres: Database) -> None:
    class Naive(BaseModel):
        id = BigAutoField()
        touched_at = DateTimeField()

    postgres.create_tables([Naive])
    Naive.create(touched_at="2026-01-01 00:00:00")
    naive = sweep("shop.naive", lambda row, now: row.touched_at < now, Naive)

    seen = worker_status(naive, datetime(2026, 1, 2, tzinfo=UTC), ZoneInfo("UTC"))
    shown = StringIO()
    Console(file=shown, width=200).print(workers_table([seen], datetime(2026, 1, 2, tzinfo=UTC)))

    assert "24 h ago" in shown.getvalue()


def test_rights_are_listed_beside_a_sweep_whose_predicate_fails() -> None:
    family = declared_by("shop", [sweep("shop.mistyped", mistyped), WHOLE])

    [(table, (_, rights))] = tables_of(family).items()

    assert (table, "DELETE" in rights) == ("basket", True)


def test_table_is_blamed_on_the_sweeps_that_use_it() -> None:
    sweeps = [WHOLE, *(broken for broken, _ in BROKEN)]

    users_of = users_by_table(sweeps)

    assert users_of(Nowhere) == ["shop.nowhere"]
    assert "shop.nowhere" not in users_of(Basket)


def test_missing_column_is_named_with_its_table_and_the_columns_that_exist(baskets: None) -> None:
    misspelled = sweep("shop.misspelled", lambda row, now: row.tuched_at < now, Misspelled)
    text = (
        'shop.misspelled: table "basket" has no column tuched_at, which Misspelled.tuched_at declares; its columns are '
        "id, touched_at"
    )

    result = run_sweep(misspelled)
    with pytest.raises(DeclarationError) as rejected:
        plan(misspelled)

    assert (result.outcome, result.reason, str(rejected.value)) == ("failed", text, text)


def test_missing_table_of_an_own_sweep_is_not_made_by_init(baskets: None) -> None:
    nowhere = sweep("shop.nowhere", lambda row, now: row.touched_at < now, Nowhere)

    with pytest.raises(SchemaMissing) as missing, translate_table_errors(nowhere):
        plan(nowhere)

    assert str(missing.value) == (
        'shop.nowhere: relation "nowhere" does not exist; create the table, or name yours in '
        'HOUSEKEEPING_WORKERS["shop.nowhere"]["tables"]'
    )


def test_run_of_a_dropped_table_would_fail_and_does(baskets: None, settings: Settings) -> None:
    nowhere, error = sweep("shop.nowhere", lambda row, now: row.touched_at < now, Nowhere), "does not exist"
    past = {"worker": nowhere.name, "trigger": "cli", "outcome": "done", "counts": {"deleted_rows": 5}}
    for _ in range(20):  # enough for a breaker
        Run.create(**past, started_at=NOW, heartbeat_at=NOW, finished_at=NOW)

    found = forecast_now(nowhere, ClockSkew(datetime.now(UTC), timedelta()), settings)
    result = run_sweep(nowhere)

    assert found.in_words == f'a run now would fail before its first change (relation "nowhere" {error})'
    assert (result.outcome, "breaker" in result.counts) == ("failed", False) and error in str(result.reason)


@pytest.fixture
def declared_key() -> Iterator[None]:
    yield
    restore_declared_key(UserStatus)


def test_plan_of_a_family_that_is_not_set_up_says_so(postgres: Database, declared_key: None) -> None:
    postgres.execute_sql("CREATE TABLE user_statuses (id bigint PRIMARY KEY)")
    status = configured_sweeps(Settings.load())["user_status_cleanup.batch"]

    with pytest.raises(SchemaMissing) as missing, translate_table_errors(status):
        plan(status)

    assert str(missing.value).startswith(
        "user_status_cleanup.batch: not set up: table user_statuses has no column clear_status_at"
    )
