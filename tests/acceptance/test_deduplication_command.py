"""The command ``housekeeping dedup``: list and release of keys (D5, D7)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.acceptance.conftest import Command
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import declared, executed, keys
from tests.integration.middleware.step_worker import StepWorker, installed

#: Starts many processes.
pytestmark = pytest.mark.slow


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    with installed(settings) as broker:
        yield broker


def listed(command: Command) -> list[dict[str, Any]]:
    finished = command("dedup", "list", "--json")
    assert finished.returncode == 0, finished.stderr
    held: list[dict[str, Any]] = json.loads(finished.stdout)["keys"]
    return held


def test_keys_are_listed_with_message_state_and_expiry(command: Command, broker: RedisBroker) -> None:
    seen: list[dict[str, Any]] = []

    def look() -> None:
        work.send(1)
        seen.extend(listed(command))

    work = declared(broker, [], look, **executed(if_deduplicated="reschedule_once"))
    running, waiting = work.send(1), work.send(2)
    StepWorker(broker).run()

    by_message = {each["message_id"]: each for each in seen}
    assert set(by_message) == {running.message_id, waiting.message_id}
    assert [by_message[m.message_id]["state"] for m in (running, waiting)] == ["running", "waiting"]
    assert [by_message[m.message_id]["again"] for m in (running, waiting)] == [True, False]
    assert all(each["actor"] == "work" and 500 < each["remaining_s"] <= 600 for each in seen)


def test_released_key_is_reported_with_its_consequence(command: Command, broker: RedisBroker) -> None:
    work = declared(broker, [], **executed())
    message = work.send()
    (held,) = listed(command)

    shown = command("dedup", "list").stdout
    freed = command("dedup", "release", held["key"])

    assert held["key"] in shown and message.message_id in shown and "waiting" in shown
    assert freed.returncode == 0
    assert freed.stdout.splitlines() == [
        f"{held['key']}: message {message.message_id}, waiting; its message stays in the queue; "
        "if another is sent now, one of the two runs",
        f"released: {held['key']}, held by message {message.message_id}, waiting",
    ]
    assert command("dedup", "list").stdout == "no keys are held\n"


def test_key_list_respects_its_limit(command: Command, broker: RedisBroker) -> None:
    work = declared(broker, [])
    for number in range(3):
        work.send(number)

    finished = command("dedup", "list", "--limit", "2")

    assert finished.stdout.count("waiting") == 2
    assert "there are more than these 2" in finished.stdout


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("work:00", "no message holds the key 'work:00'; see: housekeeping dedup list"),
        ("work:*", "'work:*' is a pattern; name each key in full"),
    ],
)
def test_release_of_an_unheld_key_releases_nothing(
    command: Command, broker: RedisBroker, redis_client: redis.Redis, settings: Settings, key: str, line: str
) -> None:
    declared(broker, []).send()
    (name,) = keys(redis_client, settings)

    finished = command("dedup", "release", name.decode(), key)

    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.count("\n") == 1 and line in finished.stderr
    assert len(keys(redis_client, settings)) == 1


def test_unavailable_redis_is_one_error_line(command: Command) -> None:
    finished = command("dedup", "list", REDIS_URL="redis://127.0.0.1:1")

    assert (finished.returncode, finished.stdout) == (1, "")
    assert "Redis did not answer" in finished.stderr and finished.stderr.count("\n") == 1


def test_message_with_a_released_key_does_not_release_its_successors(
    command: Command, broker: RedisBroker, redis_client: redis.Redis, settings: Settings
) -> None:
    # D5, D7: released while it runs, and taken by another message
    runs: list[Any] = []

    def release_and_send() -> None:
        if len(runs) == 1:
            (name,) = keys(redis_client, settings)
            assert command("dedup", "release", name.decode()).returncode == 0
            assert "duplicate_of" not in work.send().options

    work = declared(broker, runs, release_and_send, **executed())
    step_worker = StepWorker(broker)
    work.send()
    step_worker.run()

    assert len(queued(broker)) == 1
    assert "duplicate_of" in work.send().options, "the first one's end freed nothing of the second one's"
    step_worker.run()
    assert runs == [0, 0]
    assert keys(redis_client, settings) == []
