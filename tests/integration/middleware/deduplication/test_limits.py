"""Cost of deduplication in round trips, and its behavior without Redis (D10, L5)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.faults import lose_connection, start_lost
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import fail
from tests.integration.middleware.step_worker import StepWorker, counting, installed
from tests.internals.embedded import embedded
from tests.internals.middleware import UnusableArguments

TTL = timedelta(minutes=10)
ALL: Any = {"ttl": TTL, "including_scheduled": True, "if_deduplicated": "reschedule_once"}


@pytest.fixture
def known_scripts(broker: RedisBroker, step_worker: StepWorker) -> None:
    """Load every script, as in a process that is not new."""
    warm = dramatiq.actor(broker=broker, actor_name="warm", idempotent=True, deduplicate="until_executed")(fail)
    warm.send_with_options(max_retries=1)
    step_worker.run()
    step_worker.come_due()
    step_worker.run()


def send(actor: Actor[..., Any], step_worker: StepWorker) -> None:
    actor.send()
    step_worker.run()


def send_delayed(actor: Actor[..., Any], step_worker: StepWorker) -> None:
    actor.send_with_options(delay=60_000)
    step_worker.come_due()
    step_worker.run()


@pytest.mark.usefixtures("known_scripts")
@pytest.mark.parametrize("deduplication", [{"ttl": TTL}, ALL])
@pytest.mark.parametrize("strategy", ["until_executed", "until_executing"])
@pytest.mark.parametrize("sent", [send, send_delayed])
def test_message_costs_no_more_round_trips_than_its_steps(
    broker: RedisBroker,
    step_worker: StepWorker,
    sent: Callable[[Actor[..., Any], StepWorker], None],
    strategy: str,
    deduplication: dict[str, Any],
    broker_url: str | None,
) -> None:
    # D10
    work = dramatiq.actor(broker=broker, idempotent=True, deduplicate=strategy, deduplication=deduplication)(
        lambda: None
    )

    with counting(":dedup:") as commands:
        sent(work, step_worker)

    # Enqueue (one of them), start and end; four where the enqueue takes two, or tells the key of the due copy.
    reserved = broker_url is not None
    told = sent is send_delayed and deduplication is ALL and not reserved
    assert len(commands) == (3 if strategy == "until_executed" else 2) + (reserved or told)
    assert queued(broker) == []


def test_message_with_key_on_other_redis_costs_four_round_trips_at_most(
    settings: Settings, redis_client: redis.Redis
) -> None:
    # D10: reserve, confirm, start and end
    with (
        embedded.start(postgres=False) as servers,
        installed(settings.model_copy(update={"broker_url": servers.redis_url})) as broker,
    ):
        step_worker = StepWorker(broker)
        work = dramatiq.actor(broker=broker, idempotent=True, deduplicate="until_executed")(lambda: None)
        send(work, step_worker)  # loads the scripts

        with counting(":dedup:") as commands:
            send(work, step_worker)

    assert len(commands) == 4


@pytest.mark.usefixtures("known_scripts")
def test_retry_costs_three_round_trips_at_most(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D10
    def work() -> None:
        raise RuntimeError

    actor = dramatiq.actor(broker=broker, idempotent=True, deduplicate="until_executed", max_retries=1)(work)
    actor.send()
    step_worker.run()

    with counting(":dedup:") as commands:
        step_worker.come_due()
        step_worker.run()

    assert len(commands) <= 3


@pytest.mark.parametrize("strategy", ["until_executed", "until_executing"])
def test_each_live_message_has_one_key_that_expires(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings, strategy: str
) -> None:
    # D10
    work = dramatiq.actor(broker=broker, actor_name="work", idempotent=True, deduplicate=strategy)(lambda number: None)
    pattern = f"{settings.namespace}:dedup:*"

    for number in (1, 2, 3, 1, 2, 3):
        work.send(number)
    lives = [redis_client.pttl(key) for key in redis_client.scan_iter(match=pattern, count=1000)]
    for _ in range(3):
        step_worker.run()

    assert len(lives) == 3
    assert all(0 < life <= 3_600_000 for life in lives)
    assert list(redis_client.scan_iter(match=pattern, count=1000)) == []


def test_without_redis_no_message_runs_and_the_retry_keeps_the_key(
    broker: RedisBroker, step_worker: StepWorker
) -> None:
    # L5, D1: the answer to the start is lost, but the start took effect
    runs: list[int] = []
    work = dramatiq.actor(broker=broker, actor_name="work", idempotent=True, deduplicate="until_executed")(
        lambda: runs.append(1)
    )
    first = work.send()
    message = step_worker.fetch()

    with start_lost("after"):
        step_worker.run(message)

    assert runs == []
    assert work.send().options["duplicate_of"] == first.message_id
    step_worker.come_due()
    step_worker.run()
    assert runs == [1]
    assert "duplicate_of" not in work.send().options


def test_message_already_in_the_broker_survives_the_loss_of_its_key(
    broker: RedisBroker, step_worker: StepWorker
) -> None:
    # R4: an error where a delayed message comes due would leave it behind
    key: Any = {"key": lose_connection}
    work = dramatiq.actor(broker=broker, actor_name="work", idempotent=True, deduplication=key)(lambda: None)
    delayed = work.send_with_options(delay=60_000)

    step_worker.come_due()

    assert [message.message_id for message in queued(broker)] == [delayed.message_id]


def test_unserializable_arguments_are_refused_at_send(broker: RedisBroker) -> None:
    # D3
    work: Any = dramatiq.actor(broker=broker, actor_name="work", idempotent=True)(lambda number: None)

    with pytest.raises(UnusableArguments, match="work: its arguments"):
        work.send(object())
    with pytest.raises(UnusableArguments, match="too many positional arguments"):
        work.send(1, 2)
    assert queued(broker) == []


@pytest.mark.parametrize("strategy", ["until_executed", "until_executing"])
def test_message_given_up_after_an_unanswered_start_blocks_no_other(
    broker: RedisBroker, step_worker: StepWorker, strategy: str
) -> None:
    # D4: the start did not release its key, so the end has to
    once: Any = {"idempotent": True, "deduplicate": strategy, "max_retries": 0}
    work = dramatiq.actor(broker=broker, actor_name="work", **once)(lambda: None)
    work.send()

    message = step_worker.fetch()

    with start_lost("before"):
        step_worker.run(message)

    assert "duplicate_of" not in work.send().options
