"""Which messages are enqueued, and which hold a key (D1, D2, D9), on a real Redis."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Actor, Message
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import TTL, declared, executed, executing, fail, keys
from tests.integration.middleware.step_worker import StepWorker

PATIENCE_S = 60


def test_duplicate_is_returned_marked_and_not_enqueued(broker: RedisBroker, caplog: pytest.LogCaptureFixture) -> None:
    # D1, D2
    caplog.set_level(logging.INFO)
    work: Actor[..., Any] = declared(broker, [])

    first, second, other = work.send(7), work.send(7), work.send(8)

    assert [message.message_id for message in queued(broker)] == [first.message_id, other.message_id]
    assert second.options["duplicate_of"] == first.message_id
    assert "duplicate_of" not in first.options
    assert (second.actor_name, second.args) == (first.actor_name, first.args)
    assert [getattr(record, "job_status", None) for record in caplog.records].count("deduplicated") == 1


def test_until_executed_holds_its_key_until_the_run_ends(
    broker: RedisBroker, step_worker: StepWorker, redis_client: redis.Redis, settings: Settings
) -> None:
    # D1, D4
    meanwhile: list[Message[Any]] = []
    work: Actor[..., Any] = declared(broker, [], lambda: meanwhile.append(work.send()), **executed())

    first = work.send()
    step_worker.run()

    assert meanwhile[0].options["duplicate_of"] == first.message_id
    assert keys(redis_client, settings) == []


def test_until_executing_releases_its_key_when_it_starts(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D1
    meanwhile: list[Message[Any]] = []
    work: Actor[..., Any] = declared(broker, [], lambda: meanwhile.extend([work.send(), work.send()]), **executing())

    work.send()
    step_worker.run()

    assert "duplicate_of" not in meanwhile[0].options
    assert meanwhile[1].options["duplicate_of"] == meanwhile[0].message_id


@pytest.mark.parametrize("options", [executed(), executing()])
def test_delayed_message_holds_no_key_before_it_is_due(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], options: dict[str, Any]
) -> None:
    # D1, D9
    work: Actor[..., Any] = declared(broker, runs, **options)

    delayed = work.send_with_options(delay=60_000)
    now = work.send()
    step_worker.come_due()

    assert "duplicate_of" not in delayed.options and "duplicate_of" not in now.options
    assert [message.message_id for message in queued(broker)] == [now.message_id]
    assert queued(broker, "default.DQ") == []


def test_delayed_message_takes_the_key_when_it_is_due(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # D1
    work: Actor[..., Any] = declared(broker, runs, **executed())

    delayed = work.send_with_options(delay=60_000)
    step_worker.come_due()

    assert work.send().options["duplicate_of"] == delayed.message_id
    step_worker.run()
    assert runs == [0]
    assert "duplicate_of" not in work.send().options


@pytest.mark.parametrize("strategy", ["until_executed", "until_executing"])
def test_delayed_message_with_including_scheduled_holds_its_key_at_once(
    broker: RedisBroker,
    step_worker: StepWorker,
    runs: list[Any],
    redis_client: redis.Redis,
    settings: Settings,
    strategy: str,
) -> None:
    # D9
    work: Actor[..., Any] = declared(
        broker, runs, deduplicate=strategy, deduplication={"ttl": TTL, "including_scheduled": True}
    )

    delayed = work.send_with_options(delay=3_600_000)

    assert work.send().options["duplicate_of"] == delayed.message_id
    assert work.send_with_options(delay=5).options["duplicate_of"] == delayed.message_id
    (key,) = keys(redis_client, settings)
    assert 4_190_000 < redis_client.pttl(key) <= 4_200_000
    step_worker.come_due()
    assert work.send().options["duplicate_of"] == delayed.message_id
    step_worker.run()
    assert runs == [0]
    assert keys(redis_client, settings) == []


def test_delay_until_a_time_in_the_past_keeps_the_key(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # D1, D9
    work: Actor[..., Any] = declared(broker, runs, **executed(including_scheduled=True))

    late = work.send_with_options(delay=-2 * int(TTL.total_seconds() * 1000))

    assert work.send().options["duplicate_of"] == late.message_id
    step_worker.come_due()
    step_worker.run()
    assert runs == [0]


def test_waiting_until_executed_retry_holds_its_key(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    # D1, D7
    work: Actor[..., Any] = declared(broker, runs, fail, min_backoff=3_600_000, max_backoff=3_600_000, **executed())

    first = work.send()
    step_worker.run()

    assert work.send().options["duplicate_of"] == first.message_id
    (key,) = keys(redis_client, settings)
    # Half of the longest backoff at least, because of Dramatiq's jitter, and the ttl on top.
    assert redis_client.pttl(key) > 1_800_000 + 500_000
    step_worker.come_due()
    assert work.send().options["duplicate_of"] == first.message_id
    step_worker.run()
    assert runs == [0, 0]


def test_until_executing_retry_takes_the_key_when_it_is_due(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # D1, R4
    work: Actor[..., Any] = declared(broker, runs, fail, **executing())

    first = work.send(1)
    work.send(2)
    step_worker.run(), step_worker.run()
    waiting = work.send(1)
    step_worker.come_due()

    assert "duplicate_of" not in waiting.options
    assert sorted(message.args for message in queued(broker)) == [(1,), (2,)]
    assert first.message_id not in [message.message_id for message in queued(broker)]
    assert "duplicate_of" in work.send(2).options


def test_groups_and_pipelines_drop_duplicates_without_dependents(broker: RedisBroker) -> None:
    # D2
    work: Actor[..., Any] = declared(broker, [])
    work.send(1)

    dramatiq.group([work.message(1), work.message(2)], broker=broker).run()
    dramatiq.pipeline([work.message(2)], broker=broker).run()

    assert sorted(message.args for message in queued(broker)) == [(1,), (2,)]


@pytest.mark.parametrize(
    "waiting", [{"pipe_target": {"x": 1}}, {"group_completion_uuid": "g"}, {"on_success": "w"}, {"on_failure": "w"}]
)
def test_message_with_dependents_is_never_dropped(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], waiting: dict[str, Any]
) -> None:
    # D2
    work: Actor[..., Any] = declared(broker, runs, **executed())
    holder = work.send()

    awaited = broker.enqueue(work.message_with_options(**waiting))

    assert "duplicate_of" not in awaited.options
    assert len(queued(broker)) == 2
    message, behind = step_worker.fetch(), step_worker.fetch()
    assert message is not None and message.message_id == holder.message_id and behind is not None
    behind.options.update(dict.fromkeys(waiting))  # its followers are not part of this test
    behind.options["never_dropped"] = True
    step_worker.run(behind)
    assert work.send().options["duplicate_of"] == holder.message_id, "it frees no key but its own"
    step_worker.run(message)
    assert runs == [0, 0]


def test_message_with_dependents_takes_a_free_key(broker: RedisBroker) -> None:
    # D2
    work: Actor[..., Any] = declared(broker, [], **executed())

    awaited = work.send_with_options(on_success="work")

    assert work.send().options["duplicate_of"] == awaited.message_id


def test_pipe_target_is_never_dropped(broker: RedisBroker, step_worker: StepWorker, runs: list[Any]) -> None:
    # D2
    work: Actor[..., Any] = declared(broker, runs)
    holder = work.send(5)
    source = dramatiq.actor(broker=broker, actor_name="source", queue_name="sources")(lambda: 5)

    pipe = dramatiq.pipeline([source.message(), work.message()], broker=broker).run()
    StepWorker(broker, "sources").run()

    target = pipe.messages[1].message_id
    assert [message.message_id for message in queued(broker)] == [holder.message_id, target]
    step_worker.run(), step_worker.run()
    assert runs == [5, 5]


def test_of_many_concurrent_senders_one_enqueues(broker: RedisBroker) -> None:
    # D1
    work: Actor[..., Any] = declared(broker, [])
    together = threading.Barrier(8)

    def send(_: int) -> Message[Any]:
        together.wait(PATIENCE_S)
        return work.send()

    with ThreadPoolExecutor(8) as threads:
        messages = list(threads.map(send, range(8)))

    assert len(queued(broker)) == 1
    assert sum("duplicate_of" not in message.options for message in messages) == 1
