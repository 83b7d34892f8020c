"""Messages that a new message for the same work does not supersede (D1, D2)."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor, Message, pipeline

from housekeeping.core.settings import Settings
from tests.faults import elsewhere
from tests.integration.middleware.deduplication.deduplicated import TTL, declared, executed, keys
from tests.integration.middleware.deduplication.superseding import HOUR_MS, Storage, failed
from tests.integration.middleware.deduplication.superseding import actor as actor
from tests.integration.middleware.deduplication.superseding import broker as broker
from tests.integration.middleware.deduplication.superseding import storage as storage
from tests.integration.middleware.step_worker import StepWorker


@pytest.mark.parametrize("state", ["waits_to_start", "runs", "due_and_waits_to_start"])
def test_message_that_is_not_waiting_for_a_retry_is_not_superseded(  # D1
    step_worker: StepWorker, actor: Actor[..., Any], state: str, redis_client: redis.Redis, settings: Settings
) -> None:
    new: list[Message[Any]] = []
    if state == "runs":
        function = actor.fn

        def send_meanwhile(project_id: int) -> None:
            elsewhere(lambda: new.append(actor.send(7)))()
            function(project_id)

        actor.fn = send_meanwhile
    old = actor.send(7)
    if state != "waits_to_start":
        step_worker.run()
    if state == "due_and_waits_to_start":
        end_the_delay(step_worker, redis_client, settings)
    if state != "runs":
        new.append(actor.send(7))

    assert new[0].options["duplicate_of"] == old.message_id


def end_the_delay(step_worker: StepWorker, client: redis.Redis, settings: Settings) -> None:
    """End the delay, and expire the key by as much."""
    [key] = keys(client, settings)
    client.pexpire(key, TTL)
    step_worker.come_due()


def test_retry_due_within_a_minute_is_not_superseded(
    broker: Any, step_worker: StepWorker, runs: list[Any], storage: Storage
) -> None:
    actor = declared(broker, runs, storage, rediscovered=True, **executed())
    soon = failed(actor, step_worker)

    assert actor.send(7).options["duplicate_of"] == soon.message_id


def test_retry_is_not_superseded_unless_its_work_is_rediscovered(  # D1
    broker: Any, step_worker: StepWorker, runs: list[Any], storage: Storage
) -> None:
    old = failed(declared(broker, runs, storage, **executed()), step_worker, retries=20)

    assert broker.get_actor("work").send(7).options["duplicate_of"] == old.message_id


def test_delayed_message_does_not_supersede_a_retry(
    broker: Any, step_worker: StepWorker, runs: list[Any]
) -> None:  # D9
    storage = Storage()
    terms = executed(including_scheduled=True)
    actor = declared(broker, runs, storage, rediscovered=True, min_backoff=HOUR_MS, **terms)
    old = failed(actor, step_worker)

    later = actor.send_with_options(args=(7,), delay=HOUR_MS)

    assert later.options["duplicate_of"] == old.message_id


@pytest.mark.parametrize("waits", ["pipe_target", "on_failure"])
def test_retry_with_dependents_is_not_superseded(  # D2
    broker: Any, step_worker: StepWorker, actor: Actor[..., Any], storage: Storage, waits: str
) -> None:
    after: list[int] = []
    follower = dramatiq.actor(broker=broker, actor_name="follower")(lambda *_: after.append(1))
    if waits == "pipe_target":
        pipeline([actor.message(7), follower.message()], broker=broker).run()
        step_worker.run()
    else:
        failed(actor, step_worker, on_success="follower", on_failure="follower")
        step_worker.run()
        after.clear()

    new = actor.send(7)
    storage.away = False
    step_worker.come_due()
    while message := step_worker.fetch():
        step_worker.run(message)

    assert "duplicate_of" in new.options
    assert after == [1]
