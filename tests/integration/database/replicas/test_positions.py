from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor, Message
from dramatiq.common import current_millis

from housekeeping import enqueue_many, read_database
from tests.conftest import Urls
from tests.faults import at_step, once
from tests.integration.database.replicas.conftest import Application, MakeApplication
from tests.integration.database.replicas.standby import Standby
from tests.internals.database import WalPositionReader
from tests.internals.middleware import position_prefix

pytestmark = pytest.mark.slow

DAY = timedelta(hours=24)
#: The settings that say where the queues are.
Queues = Callable[[str], dict[str, str]]
Send = Callable[[Actor[..., Any]], Message[Any]]


def declared(application: Application, seen: list[Any], **options: Any) -> Actor[..., None]:
    @dramatiq.actor(
        broker=application.broker,
        actor_name="look",
        max_retries=0,
        data_consistency="sticky",
        **{"idempotent": True, **options},
    )
    def look(number: int = 0) -> None:
        seen.append(read_database().execute_sql("SELECT count(*) FROM notes").fetchone()[0])

    return look


def one(actor: Actor[..., Any]) -> Message[Any]:
    return actor.send()


def many(actor: Actor[..., Any]) -> Message[Any]:
    return enqueue_many(actor, [0])[0]


def with_the_keys(url: str) -> dict[str, str]:
    return {}


def elsewhere(url: str) -> dict[str, str]:
    return {"broker_url": f"{url}?db=1"}


@pytest.mark.parametrize("queues", [with_the_keys, elsewhere])
@pytest.mark.parametrize("send", [one, many])
@pytest.mark.parametrize("deduplicate", ["until_executing", "until_executed"])
def test_newest_position_of_a_message_and_its_dropped_duplicates_counts(
    make_application: MakeApplication, standby: Standby, deduplicate: str, send: Send, queues: Queues, urls: Urls
) -> None:
    application, seen = make_application(standby.url, **queues(urls.redis)), list[Any]()
    look = declared(application, seen, deduplicate=deduplicate)
    look.send()
    standby.catch_up(application.primary)
    standby.hold_up()
    application.write("before the duplicate was sent")

    duplicate = send(look)

    assert "duplicate_of" in duplicate.options
    assert (application.run(), seen) == ("primary", [1])


def test_an_older_position_takes_no_newer_one_s_place(
    make_application: MakeApplication, standby: Standby, redis_client: redis.Redis
) -> None:
    application, seen, newest = make_application(standby.url), list[Any](), list[str]()
    look = declared(application, seen)
    look.send()
    older = application.position()

    def send_with_a_newer_position() -> None:
        application.write("before the duplicate was sent")
        look.send()
        newest.extend(remembered(application, redis_client))

    with at_step(WalPositionReader, "current", "after", once(send_with_a_newer_position)):
        look.send()

    assert [str(older)] < newest == remembered(application, redis_client)


def remembered(application: Application, client: redis.Redis) -> list[str]:
    prefix = application.consistency._prefix
    values: list[Any] = [client.get(key) for key in client.scan_iter(match=f"{prefix}*")]
    return [value.decode() for value in values]


def test_positions_are_left_by_dropped_duplicates_only_and_for_a_day(
    make_application: MakeApplication, standby: Standby, redis_client: redis.Redis, settings: Any
) -> None:
    application = make_application(standby.url)
    look = declared(application, [])
    look.send(1)
    before = remembered(application, redis_client)

    look.send(1)
    [key] = redis_client.scan_iter(match=f"{position_prefix(settings.namespace)}*")

    left_ms: Any = redis_client.pttl(key)
    assert before == []
    assert DAY - timedelta(minutes=1) < timedelta(milliseconds=left_ms) <= DAY


def test_requeued_message_keeps_its_position(make_application: MakeApplication, standby: Standby) -> None:
    application = make_application(standby.url)

    @dramatiq.actor(broker=application.broker, max_retries=1, data_consistency="sticky")
    def fail_once() -> None:
        raise ValueError

    fail_once.send()
    sent = application.step_worker.fetch()
    application.write("since")
    assert sent is not None
    application.step_worker.run(sent)
    application.step_worker.come_due()
    retried = application.step_worker.fetch()

    assert retried is not None and retried.options["retries"] == 1
    assert retried.options["database_position"] == sent.options["database_position"]


@pytest.mark.parametrize(("age", "used"), [(DAY / 2 - timedelta(minutes=1), "replica"), (DAY / 2, "primary")])
def test_message_older_than_12_hours_reads_from_the_primary(
    make_application: MakeApplication, standby: Standby, age: timedelta, used: str
) -> None:
    application = make_application(standby.url)
    message = declared(application, []).message()
    application.broker.enqueue(message.copy(message_timestamp=current_millis() - int(age.total_seconds() * 1000)))
    standby.catch_up(application.primary)

    assert application.run() == used


def test_without_replicas_a_message_costs_no_statement_and_carries_nothing(
    make_application: MakeApplication, statements: list[str]
) -> None:
    application, seen = make_application(), list[Any]()

    message = declared(application, seen).send()

    assert ("database_position" in message.options, statements) == (False, [])
    assert (application.run(), seen) == ("primary", [0])


def test_a_position_costs_its_sender_one_statement(
    make_application: MakeApplication, standby: Standby, statements: list[str]
) -> None:
    declared(make_application(standby.url), []).send()

    assert ["pg_current_wal_insert_lsn" in statement for statement in statements] == [True]


def test_many_messages_cost_one_statement_together(
    make_application: MakeApplication, standby: Standby, statements: list[str]
) -> None:
    application = make_application(standby.url)
    look = declared(application, [])

    with application.consistency.sending_many():
        together = [look.send(number) for number in range(3)]
    application.write("since")
    later = [look.send(number) for number in (3, 4)]

    positions = [message.options["database_position"] for message in (*together, *later)]
    assert (len(set(positions[:3])), len(statements)) == (1, 3)
    assert positions[0] < positions[3]
