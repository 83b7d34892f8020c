"""New messages that supersede a waiting retry of rediscovered work (D1, D6, D7)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

import dramatiq
import pytest
import redis
from dramatiq import Actor, Message, MessageProxy, pipeline

import housekeeping
from housekeeping import embedded
from housekeeping.core.settings import Settings
from tests.faults import Crash, crash, elsewhere, exchanges
from tests.integration.middleware.applications import queued
from tests.integration.middleware.deduplication.deduplicated import TTL, declared, executed, keys
from tests.integration.middleware.step_worker import StepWorker, counting, delivered_again, installed

HOUR_MS: Final = 3_600_000


class Storage:
    """Work of an actor whose storage is unavailable until the test restores it."""

    def __init__(self) -> None:
        self.away = True
        self.effects = 0

    def __call__(self) -> None:
        if self.away:
            raise RuntimeError("storage away")
        self.effects += 1


@pytest.fixture(params=["keys_with_queue", "keys_elsewhere"])
def broker(request: pytest.FixtureRequest, settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    """Return a broker whose queues share the Redis of the keys, and one whose queues do not."""
    if request.param == "keys_with_queue":
        with installed(settings) as broker:
            yield broker
        return
    with (
        embedded.start(postgres=False) as servers,
        installed(settings.model_copy(update={"broker_url": servers.redis_url})) as broker,
    ):
        yield broker


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def actor(broker: Any, runs: list[Any], storage: Storage) -> Actor[..., Any]:
    """Return an actor whose retries wait for an hour or longer."""
    delays = {"min_backoff": 2 * HOUR_MS, "max_backoff": 3 * HOUR_MS}
    return declared(broker, runs, storage, rediscovered=True, **delays, **executed())


def failed(actor: Actor[..., Any], step_worker: StepWorker, **sent: Any) -> Message[Any]:
    """Return a message that waits for its retry."""
    message: Message[Any] = actor.send_with_options(**{"args": (7,), **sent})
    step_worker.run()
    return message


def live(broker: Any) -> tuple[int, int]:
    """Return how many messages wait to start, and how many are delayed."""
    return len(queued(broker)), len(queued(broker, "default.DQ"))


def marks(client: redis.Redis, settings: Settings) -> list[bytes]:
    return list(client.scan_iter(match=f"{settings.namespace}:superseded:*", count=1000))


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
