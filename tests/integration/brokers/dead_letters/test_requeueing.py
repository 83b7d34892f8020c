"""Requeueing of dead letters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import dramatiq
import pytest

from housekeeping import Settings
from tests.faults import Where, exchanges, instead_of_pauses, lose_connection, once
from tests.integration.brokers.dead_letters.conftest import Doomed
from tests.integration.brokers.dead_letters.test_looking import bury
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import executed, keys
from tests.integration.middleware.step_worker import StepWorker
from tests.internals.brokers import DeadLetterStore, LetterResult, dead_letters_of, find, newest, requeue
from tests.internals.core import DeadLetterRefused, RedisUnavailable

PATIENCE_S = 60
#: The script that moves a dead letter to its queue.
_MOVE = ["EVALSHA", ".XQ.msgs"]
_OF_REDIS = "it breaks a command of the Redis broker"


def test_requeued_message_keeps_its_id(  # R6
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:
    actor = doomed(idempotent=True)
    sent = actor.send_with_options(args=(7,), idempotency_key="order-7", tick="2026-03-02T10:00:00+00:00", claim="x")
    step_worker.run()

    letters = newest(store, 1)

    requeue(store, [sent.message_id])

    [message] = queued(broker)
    assert (message.message_id, message.args) == (sent.message_id, (7,))
    kept = {"idempotency_key": "order-7", "tick": "2026-03-02T10:00:00+00:00"}
    assert {name: value for name, value in message.options.items() if not name.startswith(("redis", "dedup"))} == kept
    assert newest(store, 10) == []
    assert [each.outcome for each in store.change_each("requeue", letters)] == ["gone"]


def test_requeued_message_starts_with_zero_retries(
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:
    sent = doomed(max_retries=1).send()
    step_worker.run()
    step_worker.come_due()
    step_worker.run()

    requeue(store, [sent.message_id])
    step_worker.run()

    [retry] = queued(broker, "default.DQ")
    assert retry.options["retries"] == 1


def test_requeued_message_is_not_dropped_for_its_age(
    broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:  # R6
    runs: list[int] = []
    dramatiq.actor(broker=broker, actor_name="young", max_age=60_000)(lambda: runs.append(1))
    old = broker.actors["young"].message().copy()
    object.__setattr__(old, "message_timestamp", old.message_timestamp - 100_000)
    broker.enqueue(old)
    step_worker.run()

    requeue(store, [old.message_id])
    step_worker.run()

    assert runs == [1]


def test_requeued_message_goes_to_its_actors_current_queue(
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:
    sent = doomed().send()
    step_worker.run()
    del broker.actors["doomed"]
    doomed(queue_name="elsewhere")

    requeue(store, [sent.message_id])

    assert [message.queue_name for message in queued(broker, "elsewhere")] == ["elsewhere"]


def test_duplicate_of_a_live_message_stays_a_dead_letter(  # R6, D1
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:
    actor = doomed(idempotent=True, **executed())
    dead = actor.send()
    step_worker.run()
    live = actor.send()

    results = requeue(store, [dead.message_id])

    assert results == [LetterResult(dead.message_id, "duplicate", live.message_id)]
    assert [letter.id for letter in newest(store, 10)] == [dead.message_id]
    assert [message.message_id for message in queued(broker)] == [live.message_id]


def test_requeued_message_holds_its_key_until_it_ends(  # R6, D1, D4
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore, settings: Settings
) -> None:
    actor = doomed(idempotent=True, **executed())
    dead = actor.send()
    step_worker.run()

    requeue(store, [dead.message_id])
    duplicate = actor.send()
    [key] = keys(broker.client, settings)
    waits_for_ms: Any = broker.client.pttl(key)
    step_worker.run()

    assert duplicate.options["duplicate_of"] == dead.message_id
    assert waits_for_ms > timedelta(minutes=5).total_seconds() * 1000
    assert keys(broker.client, settings) == []


@pytest.mark.parametrize("wrong", ["nobody", "5-5"])
def test_one_wrong_id_leaves_all_letters_untouched(  # R6
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore, wrong: str
) -> None:
    sent = doomed().send()
    step_worker.run()
    bury(broker, b"unreadable")

    with pytest.raises(DeadLetterRefused, match=wrong):
        requeue(store, [sent.message_id, wrong])

    assert queued(broker) == []
    assert len(newest(store, 10)) == 2


@pytest.fixture
def no_pause() -> Iterator[None]:
    """Let a retry follow at once."""
    with instead_of_pauses():
        yield


@pytest.mark.redis_broker_only(reason=_OF_REDIS)
@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(("where", "left", "moved"), [("before", 1, 0), ("after", 0, 1)], ids=["never", "lost"])
def test_redis_failure_anywhere_leaves_the_message_in_one_place(  # R6
    doomed: Doomed,
    broker: Any,
    step_worker: StepWorker,
    store: DeadLetterStore,
    where: Where,
    left: int,
    moved: int,
) -> None:
    sent = doomed().send()
    step_worker.run()

    with exchanges() as made, pytest.raises(RedisUnavailable):
        made.whenever(_MOVE, where, lose_connection)
        requeue(store, [sent.message_id])

    assert broker.client.zcard(f"{broker.namespace}:default.XQ") == left
    assert broker.client.hlen(f"{broker.namespace}:default.XQ.msgs") == left
    assert broker.client.llen(f"{broker.namespace}:default") == moved
    assert broker.client.hlen(f"{broker.namespace}:default.msgs") == moved


@pytest.mark.redis_broker_only(reason=_OF_REDIS)
@pytest.mark.usefixtures("no_pause")
def test_lost_answer_duplicates_no_message(  # R6
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:
    sent = doomed().send()
    step_worker.run()

    with exchanges() as made:
        made.whenever(_MOVE, "after", once(lose_connection))
        assert requeue(store, [sent.message_id]) == [LetterResult(sent.message_id, "requeued")]

    assert broker.client.llen(f"{broker.namespace}:default") == 1
    assert queued(broker)[0].options["redis_message_id"] != sent.options["redis_message_id"]


def test_of_two_concurrent_operators_one_requeues(  # R6
    doomed: Doomed, broker: Any, step_worker: StepWorker, settings: Settings
) -> None:
    actor = doomed(idempotent=True, **executed())
    sent = [actor.send(number) for number in range(8)]
    for _ in sent:
        step_worker.run()
    ids = [message.message_id for message in sent]
    letters = list(find(dead_letters_of(broker), ids).values())
    outcomes: list[str] = []
    together = threading.Barrier(2)

    def operate() -> None:
        store = dead_letters_of(broker)
        for letter in letters:
            together.wait(PATIENCE_S)
            outcomes.extend(each.outcome for each in store.change_each("requeue", [letter]))

    operators = [threading.Thread(target=operate) for _ in range(2)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join(PATIENCE_S)

    assert sorted(outcomes) == ["gone"] * 8 + ["requeued"] * 8
    assert len(queued(broker)) == 8
    assert all(broker.client.pttl(key) > 60_000 for key in keys(broker.client, settings))


def test_letters_with_outdated_arguments_are_refused_singly(  # R6
    doomed: Doomed, broker: Any, step_worker: StepWorker, store: DeadLetterStore
) -> None:
    sent = doomed(idempotent=True).send(1, 2)
    step_worker.run()
    del broker.actors["doomed"]

    @dramatiq.actor(broker=broker, actor_name="doomed", idempotent=True)
    def with_one_argument(project_id: int) -> None: ...

    [result] = requeue(store, [sent.message_id])

    assert result.outcome == "refused" and result.detail
    assert [letter.id for letter in newest(store, 10)] == [sent.message_id]
