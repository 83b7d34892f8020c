"""Senders that are killed, or compete, while their message supersedes a waiting retry (D1, D6)."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from dramatiq import Actor, Message, MessageProxy

from housekeeping.core.settings import Settings
from tests.faults import Crash, crash, elsewhere, exchanges
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import keys
from tests.integration.middleware.deduplication.superseding import Storage, failed, live
from tests.integration.middleware.deduplication.superseding import actor as actor
from tests.integration.middleware.deduplication.superseding import broker as broker
from tests.integration.middleware.deduplication.superseding import storage as storage
from tests.integration.middleware.step_worker import StepWorker


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("where", ["before", "after"])
def test_sender_killed_anywhere_leaves_the_work_one_run(  # D6, R4
    broker: Any, step_worker: StepWorker, actor: Actor[..., Any], runs: list[Any], storage: Storage, at: int, where: Any
) -> None:
    failed(actor, step_worker)
    storage.away = False
    with exchanges() as made:
        made.at(at, where, crash)
        try:
            actor.send(7)
        except Crash:
            pass

    while message := step_worker.fetch():
        step_worker.run(message)
    step_worker.come_due()
    while message := step_worker.fetch():
        step_worker.run(message)

    assert (len(runs), storage.effects, live(broker)) == (2, 1, (0, 0))


def test_two_concurrent_senders_supersede_a_retry_once(  # D1
    broker: Any, step_worker: StepWorker, actor: Actor[..., Any]
) -> None:
    failed(actor, step_worker)
    other: list[Message[Any]] = []
    with exchanges() as made:
        made.at(2, "before", elsewhere(lambda: other.append(actor.send(7))))
        new = actor.send(7)
    if not other:
        other.append(actor.send(7))

    assert other[0].options["duplicate_of"] == new.message_id
    assert len(queued(broker)) == 1


def test_superseding_message_may_start_before_its_sender_confirms_it(
    step_worker: StepWorker,
    actor: Actor[..., Any],
    runs: list[Any],
    storage: Storage,
    redis_client: redis.Redis,
    settings: Settings,
    broker: Any,
) -> None:
    failed(actor, step_worker)
    storage.away = False
    fetched: list[MessageProxy | None] = []

    def run_at_once() -> None:
        fetched.append(step_worker.fetch())
        step_worker.run(fetched[0])

    with exchanges() as made:
        made.at(3, "before", elsewhere(run_at_once))
        actor.send(7)
    if not fetched:
        step_worker.run()
    step_worker.come_due()
    step_worker.run()

    assert (len(runs), storage.effects, live(broker)) == (2, 1, (0, 0))
    assert keys(redis_client, settings) == []
