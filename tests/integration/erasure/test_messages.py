"""Erasures that an application requests, and workers execute."""

from __future__ import annotations

from typing import Any, Final

import pytest
import redis
from psycopg2.extensions import connection as Connection

import housekeeping
from housekeeping import Call, Settings, Subject
from tests.integration.erasure.shop import ERASED, MARKER, MARKER_ID, dump_redis, erase, row, rows
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.database import database
from tests.internals.erasures import ERASE, ERASURES, Erasure, UnknownSubject
from tests.internals.ledger import Override, switch

UUID: Final = "8c1f9a62-7c1b-4c3b-9f5e-2b8f6f1d0a3e"

pytestmark = pytest.mark.usefixtures("customers")


def test_message_has_the_number_alone_and_is_sent_once(
    broker: Any, worker: StepWorker, redis_client: redis.Redis
) -> None:
    number = housekeeping.erase("person", MARKER, reason="of May")
    assert housekeeping.erase("person", MARKER_ID) == number
    assert MARKER not in dump_redis(redis_client) and str(MARKER_ID) not in dump_redis(redis_client)

    message = worker.run()

    assert (message.actor_name, message.args, worker.fetch()) == (ERASE, (number,), None)
    assert (row(number).state, row(number).reason, rows()) == ("done", "of May", ERASED)
    assert MARKER not in dump_redis(redis_client) and str(MARKER_ID) not in dump_redis(redis_client)


def test_repeated_request_leaves_no_gap_in_the_numbers(broker: Any, worker: StepWorker) -> None:
    first = [housekeeping.erase("person", MARKER_ID) for _ in range(3)]
    worker.run()

    again = housekeeping.erase("person", MARKER_ID)

    assert first == [again - 1] * 3


def test_lost_message_is_sent_again(broker: Any, worker: StepWorker, redis_client: redis.Redis) -> None:
    number = housekeeping.erase("person", MARKER_ID)
    for key in redis_client.scan_iter():
        redis_client.delete(key)
    assert worker.fetch() is None

    broker.get_actor(ERASURES).send()
    sent, executed = worker.run(), worker.run()

    assert (sent.actor_name, executed.args) == (ERASURES, (number,))
    assert (row(number).state, rows()) == ("done", ERASED)
    broker.get_actor(ERASURES).send()
    worker.run()
    assert worker.fetch() is None


def test_request_survives_that_no_message_can_be_sent(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no broker")

    monkeypatch.setattr(broker, "enqueue", fail)

    number = housekeeping.erase("person", MARKER_ID)

    assert row(number).state == "requested"


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        ("tenant", MARKER_ID, "there is no subject 'tenant'; the subjects are person"),
        ("person", 77_000_077, "there is no person with this key (HMAC "),
        ("person", "nobody@example.org", "there is no person with this key"),
        *(("person", key, "there is no person with this key") for key in ("unknown\0", "unknown\udcff")),
    ],
)
def test_unknown_subject_is_refused_without_its_key(broker: Any, name: str, key: Any, text: str) -> None:
    with pytest.raises(UnknownSubject) as refusal:
        housekeeping.erase(name, key)

    assert str(refusal.value).startswith(text) and str(key) not in str(refusal.value)
    assert not Erasure.select().exists()


@pytest.mark.parametrize(
    ("kind", "stored", "other"),
    [("numeric", "4711.50", "4711.5"), ("our_citext", "Eve", "eve"), ("uuid", UUID, UUID.upper())],
)
def test_erased_key_is_known_by_its_other_spellings(
    settings: Settings, admin: Connection, kind: str, stored: str, other: str
) -> None:
    if kind == "our_citext":
        if not database.execute_sql("SELECT FROM pg_available_extensions WHERE name = 'citext'").fetchall():
            pytest.skip("this PostgreSQL has no citext (Debian: postgresql-15)")
        admin.cursor().execute(f"CREATE EXTENSION citext SCHEMA {settings.namespace}")
        database.execute_sql(f"CREATE DOMAIN our_citext AS {settings.namespace}.citext")
    database.execute_sql(f"CREATE TABLE member (id {kind} PRIMARY KEY)")
    database.execute_sql("INSERT INTO member VALUES (%s)", (stored,))
    told: list[str] = []
    subject = Subject("member", "member", also=[Call(told.append)])
    done = erase(settings, subject, other)

    again = erase(settings, subject, other)

    assert (done.state, again.state, told) == ("done", "done", [stored, told[-1]])
    assert again.key_hmac == done.key_hmac == erase(settings, subject, stored).key_hmac


def test_erasure_of_a_subject_that_is_not_declared_any_more_fails(broker: Any, worker: StepWorker) -> None:
    number = housekeeping.erase("person", MARKER_ID)
    Erasure.update(subject="member").execute()

    worker.run()

    assert (row(number).state, row(number).error) == ("failed", "there is no subject 'member'")


def test_erasure_waits_while_its_worker_is_paused(broker: Any, worker: StepWorker) -> None:
    switch(Override("erase:person", "paused"))
    number, before = housekeeping.erase("person", MARKER_ID), rows()

    worker.run()

    assert (row(number).state, rows()) == ("running", before)
    database.execute_sql(f'DELETE FROM "{Erasure._meta.schema}".switches')
    worker.come_due()
    worker.run()
    assert (row(number).state, rows()) == ("done", ERASED)
