"""Messages of an older release that a newer one runs (D4)."""

from __future__ import annotations

import dataclasses
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor

from housekeeping import Settings
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import executed, executing, fail, keys
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.internals.brokers import as_new
from tests.internals.middleware import KEY


def newer(broker: Any, runs: list[Any], fails: bool = False, **options: Any) -> Actor[..., Any]:
    """Return the newer release's actor ``work``, which takes one more argument."""

    def work(project_id: int = 0, thoroughly: bool = True) -> None:
        runs.append((project_id, thoroughly))
        if fails:
            fail()

    return dramatiq.actor(broker=broker, actor_name="work", idempotent=True, **options)(work)


def older(broker: Any, **options: Any) -> Actor[..., Any]:
    def work(project_id: int = 0) -> None: ...

    return dramatiq.actor(broker=broker, actor_name="work", idempotent=True, **options)(work)


@pytest.mark.parametrize("strategy", [executed, executing])
@pytest.mark.parametrize("fails", [False, True])
def test_key_taken_by_an_older_release_is_released_with_its_message(  # D4
    settings: Settings, redis_client: redis.Redis, strategy: Any, fails: bool
) -> None:
    runs: list[Any] = []
    with installed(settings) as of_before, installed(settings) as broker:
        older(of_before, **strategy()).send(7)
        taken = keys(redis_client, settings)

        newer(broker, runs, fails, max_retries=0, **strategy())
        StepWorker(broker).run()

    assert (len(taken), runs, keys(redis_client, settings)) == (1, [(7, True)], [])


def test_retry_keeps_the_key_taken_by_an_older_release(  # D1, D4
    settings: Settings, redis_client: redis.Redis
) -> None:
    runs: list[Any] = []
    with installed(settings) as of_before, installed(settings) as broker:
        older(of_before, **executed()).send(7)
        taken = keys(redis_client, settings)

        newer(broker, runs, True, max_retries=1, **executed())
        step_worker = StepWorker(broker)
        step_worker.run()
        assert keys(redis_client, settings) == taken
        step_worker.come_due()
        step_worker.run()

    assert (len(runs), keys(redis_client, settings)) == (2, [])


def test_message_sent_again_has_the_key_of_the_sending_release(  # D3
    settings: Settings, redis_client: redis.Redis
) -> None:
    with installed(settings) as broker:
        message = older(broker, **executed()).message(7)
        broker.enqueue(message)
        StepWorker(broker).run()

    with installed(settings) as broker:
        actor = newer(broker, [], **executed())
        requeued = as_new(dataclasses.replace(message, options={**message.options, KEY: "work:of-before"}))
        broker.enqueue(requeued)
        duplicate = actor.send(7, True)

    assert duplicate.options["duplicate_of"] == message.message_id


def refused_when_sent(broker: Any, runs: list[Any]) -> Actor[..., Any]:
    return dramatiq.actor(broker=broker, actor_name="work")(lambda: runs.append("work"))


def refused_when_run(broker: Any, runs: list[Any]) -> Actor[..., Any]:
    return dramatiq.actor(broker=broker, actor_name="work", idempotent=True)(lambda fewer: runs.append("work"))


@pytest.mark.parametrize(
    ("of_before", "sent", "now", "ran"),
    [
        ({"idempotent": True, "deduplicate": None}, {"idempotency_key": "k"}, refused_when_sent, ["work", "other"]),
        ({}, {"args": (1, 2)}, refused_when_run, ["other"]),
    ],
)
def test_due_message_that_could_not_be_sent_today_stops_no_other(  # B3, R3
    settings: Settings,
    redis_client: redis.Redis,
    of_before: dict[str, Any],
    sent: dict[str, Any],
    now: Any,
    ran: list[str],
) -> None:
    runs: list[Any] = []
    with installed(settings) as older_broker, installed(settings) as broker:
        older_actor = dramatiq.actor(broker=older_broker, actor_name="work", **of_before)(lambda *args: None)
        older_actor.send_with_options(**sent, delay=1)
        now(broker, runs)
        other = dramatiq.actor(broker=broker, actor_name="other")(lambda: runs.append("other"))
        other.send_with_options(delay=2)

        step_worker = StepWorker(broker)
        step_worker.come_due()
        step_worker.run()
        step_worker.run()

    assert runs == ran


def test_failed_message_whose_actor_was_idempotent_is_retried(settings: Settings, redis_client: redis.Redis) -> None:
    with installed(settings) as older_broker, installed(settings) as broker:
        actor = dramatiq.actor(broker=older_broker, actor_name="work", idempotent=True)(lambda: None)
        actor.send_with_options(idempotency_key="k")
        dramatiq.actor(broker=broker, actor_name="work")(fail)

        StepWorker(broker).run()

        assert (len(queued(broker, "default.DQ")), queued(broker, "default.XQ")) == (1, [])
