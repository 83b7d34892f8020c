"""The command ``housekeeping deadletters``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import dramatiq
import pytest
from dramatiq import Actor, Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis

from housekeeping import Settings
from tests.acceptance.conftest import Command
from tests.integration.middleware.applications import queued
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.internals.database import Database

#: Starts many processes.
pytestmark = pytest.mark.slow

#: By its name, so that the traceback contains the value only in the error's text.
SAID: Final = "no answer from amqp://me:hunter2@host/ \x1b[31mred"


@pytest.fixture
def broker(settings: Settings, redis_client: object) -> Iterator[RedisBroker]:
    with installed(settings) as broker:
        yield broker


@pytest.fixture
def charge(broker: RedisBroker) -> Actor[..., Any]:
    @dramatiq.actor(broker=broker, max_retries=0, idempotent=True)
    def charge(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError(SAID)

    return charge


@pytest.fixture
def dead(broker: RedisBroker, charge: Actor[..., Any]) -> Message[Any]:
    """Return a dead message with a secret and control characters in it."""
    message = charge.send_with_options(
        args=("order\x1b[2J", "x" * 200), kwargs={"password": "hunter2"}, idempotency_key="order-7"
    )
    StepWorker(broker).run()
    return message


def test_dead_letter_list_shows_actor_and_error(command: Command, dead: Message[Any]) -> None:
    finished = command("deadletters", "list")

    assert finished.returncode == 0, finished.stderr
    heading, line = finished.stdout.splitlines()
    assert heading.split() == ["ID", "ACTOR", "QUEUE", "DIED", "RETRIES", "ARGUMENTS", "ERROR"]
    assert line.startswith(f"{dead.message_id}  charge  default  ")
    assert "ConnectionError: no answer from amqp://me:***@host/" in line
    assert "\x1b" not in finished.stdout and "hunter2" not in finished.stdout


def test_dead_letter_json_has_the_newest_and_the_total(command: Command, dead: Message[Any]) -> None:
    listed = json.loads(command("deadletters", "list", "--json", "--limit", "1").stdout)

    [letter] = listed.pop("dead_letters")
    assert listed == {"total": 1, "older": None}
    assert {name: letter[name] for name in ("message_id", "actor", "queue", "retries", "unreadable")} == {
        "message_id": dead.message_id,
        "actor": "charge",
        "queue": "default",
        "retries": 0,
        "unreadable": None,
    }
    assert len(letter["arguments"]) == 60


def test_dead_letter_is_shown_masked_and_escaped(command: Command, dead: Message[Any]) -> None:
    finished = command("deadletters", "show", dead.message_id)

    assert finished.returncode == 0, finished.stderr
    assert "x" * 200 in finished.stdout
    assert 'kwargs: {"password": "***"}' in finished.stdout
    assert '"idempotency_key": "order-7"' in finished.stdout
    assert "Traceback (most recent call last):\n  File " in finished.stdout
    assert "hunter2" not in finished.stdout and "\x1b" not in finished.stdout
    assert "\\x1b[31mred" in finished.stdout


def test_requeue_reports_the_result_of_each_message(
    command: Command, broker: RedisBroker, charge: Actor[..., Any], dead: Message[Any]
) -> None:
    other = charge.send(2)
    StepWorker(broker).run()

    finished = command("deadletters", "requeue", dead.message_id, other.message_id)

    assert finished.stdout == f"{dead.message_id}: requeued\n{other.message_id}: requeued\n"
    assert {message.message_id for message in queued(broker)} == {dead.message_id, other.message_id}


def test_requeue_with_an_unknown_id_changes_nothing(command: Command, broker: RedisBroker, dead: Message[Any]) -> None:
    finished = command("deadletters", "requeue", dead.message_id, "no-such-id\x1b")

    assert (finished.returncode, finished.stdout, finished.stderr.count("\n")) == (2, "", 1)
    assert "there is no dead letter 'no-such-id\\x1b'; see: housekeeping deadletters list" in finished.stderr
    assert queued(broker) == [] and len(queued(broker, "default.XQ")) == 1


def test_unreadable_message_is_listed_and_not_requeued(command: Command, broker: RedisBroker) -> None:
    broker.client.zadd(f"{broker.namespace}:default.XQ", {"5-5": current_millis()})
    broker.client.hset(f"{broker.namespace}:default.XQ.msgs", "5-5", b"\xff{half a message \x1b[2J password=hunter2")

    listed, shown, requeued = (
        command("deadletters", *words) for words in (["list"], ["show", "5-5"], ["requeue", "5-5"])
    )

    assert "5-5  (unreadable)  default" in listed.stdout
    assert "body: \\xff{half a message \\x1b[2J password=***" in shown.stdout
    assert requeued.returncode == 2
    assert "'5-5' cannot be sent again, because it cannot be read: " in requeued.stderr


@pytest.fixture
def many(broker: RedisBroker) -> RedisBroker:
    """Bury three letters of one actor and two of another."""
    at = current_millis() - 3_600_000
    for number in range(5):
        actor = ("charge", "mail")[number % 2]
        body = Message("default", actor, (number,), {}, {"traceback": f"ValueError: {actor} failed"}).encode()
        broker.client.zadd(f"{broker.namespace}:default.XQ", {f"letter-{number}": at + number})
        broker.client.hset(f"{broker.namespace}:default.XQ.msgs", f"letter-{number}", body)
    return broker


def test_list_filters_and_continues_where_the_page_before_ended(command: Command, many: RedisBroker) -> None:
    sought = ["--actor", "charge", "--error", "FAILED", "--since", "2h", "--json"]
    first = json.loads(command("deadletters", "list", "--limit", "2", *sought).stdout)
    second = json.loads(command("deadletters", "list", "--before", first["older"], *sought).stdout)
    in_words = command("deadletters", "list", "--limit", "1")

    listed = [letter["broker_id"] for page in (first, second) for letter in page["dead_letters"]]
    assert listed == ["letter-4", "letter-2", "letter-0"] and second["older"] is None
    assert "older ones: --before " in in_words.stdout
    assert in_words.stdout.endswith("1 shown, 5 dead letters in total\n")


def test_filtered_letters_are_requeued_and_all_others_deleted(
    postgres: Database, command: Command, many: RedisBroker
) -> None:
    requeued = command("deadletters", "requeue", "--actor", "charge", "--yes")
    deleted = json.loads(command("deadletters", "delete", "--all", "--yes", "--json").stdout)

    assert (requeued.returncode, requeued.stdout) == (0, "3 requeued\n"), requeued.stderr
    logged = json.loads(command("actions", "--json").stdout)["actions"]
    assert [each["target"] for each in logged] == ["2 dead letters: all", "3 dead letters: actor 'charge'"]
    assert deleted["counts"] == {"deleted": 2} and deleted["not_tried"] == 0
    assert sorted(message.args[0] for message in queued(many)) == [0, 2, 4]
    assert queued(many, "default.XQ") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["delete", "--all"], "there is no terminal to confirm it on; nothing was deleted; add --yes"),
        (["requeue", "--all", "--json"], "--json does not ask for a confirmation; add --yes"),
        (["delete"], "choose dead letters by their IDs, by filters such as --actor, or take --all of them"),
        (["delete", "--all", "--actor", "charge"], "choose dead letters by their IDs"),
        (["requeue", "--since", "soon"], "'soon' is not a time"),
        (["list", "--before", "here"], "'here' is not a place in the dead letters"),
    ],
)
def test_unclear_or_unconfirmed_change_changes_nothing(
    command: Command, many: RedisBroker, words: list[str], said: str
) -> None:
    finished = command("deadletters", *words)

    assert finished.returncode == 2 and said in finished.stderr
    assert many.client.zcard(f"{many.namespace}:default.XQ") == 5


def test_broken_letter_in_a_bulk_requeue_is_named_and_the_others_are_sent(command: Command, many: RedisBroker) -> None:
    many.client.zadd(f"{many.namespace}:default.XQ", {"broken": 1})
    many.client.hset(f"{many.namespace}:default.XQ.msgs", "broken", b"\xff")

    finished = command("deadletters", "requeue", "--all", "--yes")

    named, summary = finished.stdout.splitlines()
    assert finished.returncode == 1 and named.startswith("broken: kept: it cannot be sent: ")
    assert summary == "5 requeued; 1 kept because it cannot be sent"
