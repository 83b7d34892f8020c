"""Sweeps on Django models: names, types, keys, and models that a sweep cannot take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, models
from peewee import Field
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import parse_dsn

from housekeeping import Call, Delete, Event, Limits, Rows, StateMachine, Sweep, Transition, events
from tests.declarations import changed, stage_of
from tests.integration.sweeps.table_models import django_shop as shop
from tests.internals.core import DeclarationError
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.sweeps import Action, model_of

TOKYO = "tests.integration.sweeps.table_models"
NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture
def tables(application_url: str, postgres: Database) -> Iterator[None]:
    """The application's tables, made by Django."""
    given = parse_dsn(application_url)
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    connection.settings_dict.update({names[name]: given.pop(name) for name in names if name in given})
    connection.settings_dict["OPTIONS"] = given
    with connection.schema_editor() as editor:
        for model in (shop.Customer, shop.Session):
            editor.create_model(model)
    yield
    connection.close()


@pytest.fixture
def order_lines(tables: None, admin: Connection) -> Iterator[None]:
    with admin.cursor() as cursor:
        cursor.execute('DROP SCHEMA IF EXISTS "order" CASCADE; CREATE SCHEMA "order"')
    with connection.schema_editor() as editor:
        editor.create_model(shop.OrderLine)
    yield
    connection.close()
    with admin.cursor() as cursor:
        cursor.execute('DROP SCHEMA "order" CASCADE')


def add_sessions(*expires: datetime | None, **columns: Any) -> list[Any]:
    return [shop.Session.objects.create(expires=each, **columns) for each in expires]


def left() -> list[Any]:
    return list(shop.Session.objects.values_list("expires", flat=True).order_by("expires"))


def expired(action: Action | None = None, **options: Any) -> Sweep:
    rows = Rows(shop.Session, stale=lambda row, now: row.expires <= now, order="expires", action=action or Delete())
    return changed(Sweep("shop.expired", rows), **options)


def fields_of(table: object) -> dict[str, Field]:
    fields: dict[str, Field] = model_of(table)._meta.fields
    return fields


def test_stale_rows_of_django_model_are_deleted_in_batches(tables: None) -> None:
    now = datetime.now(UTC)
    add_sessions(None, *(now - timedelta(hours=n) for n in range(1, 6)), now + timedelta(hours=1))

    result = run_sweep(expired(batch=2))

    assert result.counts["deleted_rows"] == 5
    assert left() == [now + timedelta(hours=1), None]


def test_fields_have_django_names_and_database_columns() -> None:
    fields = fields_of(shop.Session)

    assert [*fields] == (
        ["id", "customer_id", "expires", "state", "details", "tags", "address", "price", "secret", "index_"]
    )
    assert (fields["expires"].column_name, fields["index_"].column_name) == ("expires_at", "index")
    assert [name for name, field in fields.items() if field.null] == ["customer_id", "expires", "address"]


@pytest.mark.parametrize(
    "stale",
    [
        lambda row: row.details["kind"] == "bot",
        lambda row: row.tags.contains("bot"),
        lambda row: row.address == "10.0.0.1",
        lambda row: row.price > 5,
        lambda row: row.customer_id.is_null(False),
        lambda row: row.state == shop.Session.State.CLOSED,
        lambda row: row.secret == b"\x00s",
        lambda row: row.index_ == 7,
    ],
)
def test_predicate_on_each_column_type_finds_its_rows(tables: None, stale: Any) -> None:
    customer = shop.Customer.objects.create()
    add_sessions(NOW)
    bot = {"details": {"kind": "bot"}, "tags": ["bot", "x"], "address": "10.0.0.1", "price": 6, "customer": customer}
    add_sessions(None, **bot, state="closed", secret=b"\x00s", index=7)

    result = run_sweep(Sweep("shop.bots", Rows(shop.Session, stale=stale, action=Delete())))

    assert (result.counts["deleted_rows"], left()) == (1, [NOW])


def test_transition_changes_a_state_of_django_choices(tables: None) -> None:
    add_sessions(NOW - timedelta(days=1), NOW)
    states: Any = shop.Session.State
    machine = StateMachine(model_of(shop.Session).state, states, {"close": ([states.OPEN], states.CLOSED)})

    result = run_sweep(expired(Transition(machine, "close")))

    assert result.counts["moved_rows"] == 2
    assert set(shop.Session.objects.values_list("state", flat=True)) == {"closed"}


def test_call_gets_the_row_with_django_names(tables: None) -> None:
    [session] = add_sessions(NOW, details={"a": [1]}, tags=["x"], secret=b"s", price="1.50")
    given: list[Any] = []

    run_sweep(expired(Call(given.append, then=Delete())))

    [row] = given
    assert (row.id, row.expires, row.customer_id, row.details) == (session.pk, NOW, None, {"a": [1]})
    assert (row.tags, row.secret, str(row.price)) == (["x"], b"s", "1.50")


def test_event_carries_the_named_columns(tables: None) -> None:
    [session] = add_sessions(NOW)
    event = events.event("shop.session_expired")
    told: list[dict[str, Any]] = []

    def note(sender: str, *, rows: list[dict[str, Any]], **more: Any) -> None:
        told.extend(rows)

    with event.connected_to(note):
        run_sweep(expired(event=Event(event, session="id", ended="expires_at")))

    assert told == [{"session": session.pk, "ended": NOW}]


def test_rows_with_composite_key_in_quoted_schema_are_deleted(order_lines: None, admin: Connection) -> None:
    with admin.cursor() as cursor:
        cursor.execute("INSERT INTO \"order\".line SELECT 1, n, date '2026-01-01' + n FROM generate_series(1, 5) AS n")
        sweep = Sweep(
            "shop.lines",
            Rows(
                shop.OrderLine,
                stale=lambda row: row.touched_on <= date(2026, 1, 4),
                order="touched_on",
                action=Delete(),
            ),
            limits=Limits(batch=2, batch_takes=None),
        )

        run_sweep(sweep)
        cursor.execute('SELECT line FROM "order".line')
        assert cursor.fetchall() == [(4,), (5,)]


def test_order_defaults_to_the_primary_key() -> None:
    lines = Sweep("a", Rows(shop.OrderLine, stale=lambda row, now: row.touched_on < now, action=Delete()))

    assert [column.name for column in stage_of(lines).order] == ["order_id", "line"]
    assert [column.name for column in stage_of(expired()).order] == ["expires", "id"]


def test_proxy_model_is_read_as_its_concrete_model(tables: None) -> None:
    assert model_of(shop.LateSession)._meta.table_name == "shop_session"
    assert model_of(shop.LateSession)._meta.schema is None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (shop.Dated, "shop.Dated is abstract, so it has no table; name a model that has one"),
        (shop.Invoice, r"in several tables \(shop_document, shop_invoice\); .* declare it on the parent"),
        (shop.Session.State, "is no table; it should be a Django model, a SQLAlchemy Table or mapped class, a"),
        (shop.Session.objects, "is no table"),
        ([shop.Session], "is no table"),
    ],
)
def test_model_without_a_single_table_is_rejected(model: object, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        model_of(model)


def test_model_is_rejected_before_django_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shop.Customer._meta.apps, "models_ready", False)

    class Early(models.Model):
        class Meta:
            app_label = "shop"

    with pytest.raises(DeclarationError, match=r"call django.setup\(\) before a sweep on shop.Early is declared"):
        model_of(Early)


def test_predicate_on_missing_column_is_rejected_with_the_columns() -> None:
    with pytest.raises(
        DeclarationError, match="^shop.a: stale reads row.ends, but Session has no column 'ends'; its columns are id,"
    ):
        Sweep("shop.a", Rows(shop.Session, stale=lambda row, now: row.ends < now, action=Delete())).stages_for_run()[
            0
        ].oldest(NOW)


@pytest.mark.slow
@pytest.mark.parametrize("use_tz", ["on", "off"])
def test_expired_row_is_deleted_with_use_tz_on_and_off(
    environment: dict[str, str], postgres: Database, application_url: str, use_tz: str
) -> None:
    command = [sys.executable, "-W", "error", "-m", f"{TOKYO}.tokyo"]
    given = {"USE_TZ": use_tz, "APPLICATION_URL": application_url, "DJANGO_SETTINGS_MODULE": f"{TOKYO}.tokyo_settings"}

    ended = subprocess.run(command, env={**environment, **given}, capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stdout) == (0, "valid"), ended.stderr
