"""New messages that supersede a waiting retry of rediscovered work (D1, D7)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis
from dramatiq import Actor

import housekeeping
from housekeeping.core.settings import Settings
from tests.faults import elsewhere
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import keys
from tests.integration.middleware.deduplication.superseding import HOUR_MS, Storage, failed, live, marks
from tests.integration.middleware.deduplication.superseding import actor as actor
from tests.integration.middleware.deduplication.superseding import broker as broker
from tests.integration.middleware.deduplication.superseding import storage as storage
from tests.integration.middleware.step_worker import StepWorker, counting, delivered_again


@pytest.mark.parametrize("bulk", [False, True])
def test_new_message_supersedes_waiting_retry_and_both_make_one_run(  # D1, D7
    broker: Any,
    step_worker: StepWorker,
    actor: Actor[..., Any],
    runs: list[Any],
    storage: Storage,
    bulk: bool,
    redis_client: redis.Redis,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    failed(actor, step_worker, retries=20)
    storage.away = False

    new, again = housekeeping.enqueue_many(actor, [7, 7]) if bulk else [actor.send(7), actor.send(7)]
    step_worker.run()
    step_worker.come_due()
    step_worker.run()

    assert "duplicate_of" not in new.options
    assert again.options["duplicate_of"] == new.message_id
    assert (runs, storage.effects) == ([7, 7], 1)
    assert live(broker) == (0, 0)
    assert keys(redis_client, settings) == []
    [dropped] = [record for record in caplog.records if record.getMessage() == "Superseded retry dropped"]
    assert (dropped.job_status, dropped.duplicate_of) == ("deduplicated", new.message_id)  # type: ignore[attr-defined]


def test_superseding_message_starts_with_zero_retries(
    broker: Any, step_worker: StepWorker, actor: Actor[..., Any]
) -> None:
    failed(actor, step_worker, retries=20)
    new = actor.send(7)

    step_worker.run()

    assert {message.message_id: message.options["retries"] for message in queued(broker, "default.DQ")}[
        new.message_id
    ] == 1


@pytest.mark.parametrize("due", ["while_it_waits", "while_it_runs", "while_its_retry_waits"])
def test_superseded_retry_is_dropped_whenever_it_comes_due(  # D7
    broker: Any, step_worker: StepWorker, actor: Actor[..., Any], runs: list[Any], storage: Storage, due: str
) -> None:
    old = failed(actor, step_worker)
    actor.send(7)
    storage.away = due == "while_its_retry_waits"
    new = step_worker.fetch()
    if due == "while_it_waits":
        step_worker.come_due()
        step_worker.run()
        step_worker.run(new)
    elif due == "while_it_runs":
        function = actor.fn

        def come_due_meanwhile(project_id: int) -> None:
            step_worker.come_due()
            elsewhere(lambda: step_worker.run(None))()
            function(project_id)

        actor.fn = come_due_meanwhile
        step_worker.run(new)
    else:
        step_worker.run(new)
        step_worker.come_due()
        while message := step_worker.fetch():
            storage.away = message.message_id == old.message_id
            step_worker.run(message)

    assert (len(runs), storage.effects) == (3 if due == "while_its_retry_waits" else 2, 1)
    assert live(broker) == (0, 0)


def test_redelivered_superseded_retry_is_dropped_again(  # D7, B1
    broker: Any, step_worker: StepWorker, actor: Actor[..., Any], runs: list[Any], storage: Storage
) -> None:
    failed(actor, step_worker)
    actor.send(7)
    storage.away = False
    step_worker.run()
    step_worker.come_due()
    old = step_worker.run()

    step_worker.run(delivered_again(old))

    assert (len(runs), live(broker)) == (2, (0, 0))


def test_redelivered_attempt_of_superseded_message_is_dropped(  # F10: its worker died before the acknowledgement
    broker: Any,
    step_worker: StepWorker,
    actor: Actor[..., Any],
    runs: list[Any],
    redis_client: redis.Redis,
    settings: Settings,
) -> None:
    actor.send(7)
    attempt = step_worker.fetch()
    assert attempt is not None
    again = delivered_again(attempt)
    step_worker.run(attempt)
    redis_client.delete(*redis_client.scan_iter(match=f"{settings.namespace}:retried:*", count=1000))
    new = actor.send(7)

    step_worker.run(again)

    assert runs == [7]
    assert [message.message_id for message in queued(broker)] == [new.message_id]


def test_repeatedly_superseded_retries_do_not_pile_up(  # D10
    broker: Any,
    step_worker: StepWorker,
    actor: Actor[..., Any],
    runs: list[Any],
    storage: Storage,
    redis_client: redis.Redis,
    settings: Settings,
) -> None:
    for _ in range(5):
        failed(actor, step_worker)
    waiting = live(broker)
    storage.away = False
    step_worker.come_due()
    while message := step_worker.fetch():
        step_worker.run(message)
    left = [redis_client.pttl(mark) for mark in marks(redis_client, settings)]

    assert waiting == (0, 5)
    assert (len(runs), storage.effects, live(broker)) == (6, 1, (0, 0))
    assert len(left) == 4
    assert all(0 < each <= 300_000 for each in left), "what was dropped is remembered for minutes only"


def test_superseded_retry_is_remembered_for_a_ttl_after_it_is_due(
    step_worker: StepWorker, actor: Actor[..., Any], redis_client: redis.Redis, settings: Settings
) -> None:
    failed(actor, step_worker)
    [key] = keys(redis_client, settings)
    left = redis_client.pttl(key)

    actor.send(7)

    [mark] = marks(redis_client, settings)
    assert HOUR_MS < redis_client.pttl(mark) <= left


def test_superseding_costs_no_further_round_trip(  # D10
    step_worker: StepWorker, actor: Actor[..., Any]
) -> None:
    for _ in range(2):  # loads the scripts
        failed(actor, step_worker)
    with counting(":dedup:") as plain:
        actor.send(10)
        step_worker.run()

    with counting(":dedup:") as superseding:
        actor.send(10)
        step_worker.run()

    assert len(superseding) == len(plain) <= 4
