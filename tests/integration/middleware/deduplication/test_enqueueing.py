"""Atomic enqueue of a message with its key, wherever the sender dies (D6; scenario F5)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import dramatiq
import pytest
import redis
from dramatiq import Actor
from dramatiq.brokers.redis import RedisBroker

from housekeeping import Settings, install
from tests.faults import (
    Crash,
    Where,
    crash,
    exchanges,
    lose_connection,
    redis_fault,
)
from tests.integration.middleware import applications
from tests.integration.middleware.applications import at, queued, scheduler, wake_up
from tests.integration.middleware.deduplication.deduplicated import declared, executed, keys
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.internals.brokers import StoreUnavailable
from tests.internals.core import shared_redis
from tests.internals.embedded import embedded
from tests.sentinel_servers import applications_client

pytestmark = pytest.mark.redis_broker_only(reason="with RabbitMQ a key is reserved for seconds before")

EXCHANGES: Final = 4  # more than a send has
PATIENCE_S: Final = 30
TOP: Final = Path(__file__).parents[4]


def send_crashes(work: Actor[..., Any], project_id: int, number: int, where: Where) -> bool:
    """Send, and return whether the sender crashed."""
    with exchanges() as made:
        made.at(number, where, crash)
        try:
            work.send(project_id)
        except Crash:
            return True
    return False


def test_sender_killed_anywhere_leaves_message_and_key_or_neither(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any], redis_client: redis.Redis, settings: Settings
) -> None:
    # D6, F5: and the next message that is sent holds the key once
    work: Actor[..., Any] = declared(broker, runs, **executed())
    work.send(), step_worker.run()  # connect and load the scripts
    crashed: list[bool] = []
    project_id = 0

    for number in range(1, EXCHANGES):
        for where in ("before", "after"):
            project_id += 1
            crashed.append(send_crashes(work, project_id, number, where))
            found = keys(redis_client, settings)
            assert len(found) == len(queued(broker)) == (where == "after" or not crashed[-1])
            assert all(redis_client.pttl(key) > 590_000 for key in found)

            work.send(project_id)

            assert len(queued(broker)) == 1
            step_worker.run()
            assert runs[1:] == list(range(1, project_id + 1))
    assert crashed[:3] == [True, True, False], "one exchange does it all"


def test_message_without_key_and_lost_answer_is_enqueued_once(broker: RedisBroker) -> None:
    # D6: it has dependents, so it runs beside the holder of the key
    work: Actor[..., Any] = declared(broker, [], **executed())
    work.send(1)

    with exchanges() as made:
        made.at(1, "after", lose_connection)
        work.send_with_options(args=(1,), on_success="work")

    assert broker.client.llen(f"{broker.namespace}:default") == len(queued(broker)) == 2


def test_send_repeated_after_lost_answer_enqueues_once(broker: RedisBroker) -> None:
    # D6
    work: Actor[..., Any] = declared(broker, [], **executed())
    work.send(0)

    with exchanges() as made:
        made.at(1, "after", lose_connection)
        made.at(2, "before", lose_connection)
        with pytest.raises(StoreUnavailable, match="connection reset"):
            work.send(1)
    again = work.send(1)

    assert again.options["duplicate_of"] == queued(broker)[1].message_id
    assert [message.args for message in queued(broker)] == [(0,), (1,)]


def test_message_reenqueued_after_lost_answer_is_queued_once(
    broker: RedisBroker, step_worker: StepWorker, runs: list[Any]
) -> None:
    # D6: the same message again, by an application or by a hook that retries
    work: Actor[..., Any] = declared(broker, runs, **executed())
    message = work.message(1)
    with exchanges() as made:
        made.at(2, "after", lose_connection)
        made.at(3, "before", lose_connection)
        work.send(0)
        with pytest.raises(StoreUnavailable):
            broker.enqueue(message)

    sent = broker.enqueue(message)

    assert "duplicate_of" not in sent.options
    assert len(queued(broker)) == 2
    step_worker.run(), step_worker.run()
    assert runs == [0, 1]


def test_tick_resent_after_lost_answer_runs_once(successor: RedisBroker, runs: list[Any]) -> None:
    # D6: its second message replaces the first one, whose claim to the tick has expired
    with redis_fault("enqueue", "after"):
        wake_up(successor, at(12))
    wake_up(successor, at(12, 0, 30))
    swept: Any = successor.actors["swept"]
    swept.fn = lambda: runs.append("ran")
    step_worker = StepWorker(successor)
    while (message := step_worker.fetch()) is not None:
        step_worker.run(message)

    assert runs == ["ran"]
    assert queued(successor) == []


def test_dead_letter_may_be_enqueued_again(broker: RedisBroker, step_worker: StepWorker) -> None:
    # D6: the key stays for a while and still belongs to the message that could not be started
    work: Actor[..., Any] = declared(broker, [], **executed())
    message = work.message(1)
    broker.enqueue(message)
    fetched = step_worker.take()
    broker.do_nack("default", fetched.options["redis_message_id"])

    broker.enqueue(message)

    assert len(queued(broker)) == 1


def test_custom_broker_whose_client_repeats_commands_enqueues_once(
    settings: Settings, redis_client: redis.Redis
) -> None:
    # D6: redis-py by default repeats a command after a lost answer
    client = applications_client(settings.require_redis_url())
    broker = RedisBroker(client=client, namespace=f"{settings.namespace}:own")
    install(broker, settings.model_copy(update={"database_url": None}), workers=False)
    work: Actor[..., Any] = declared(broker, [], **executed())
    plain = dramatiq.actor(broker=broker, actor_name="plain")(lambda: None)
    plain.send(), work.send(0)

    with exchanges() as made:
        made.at(1, "after", lose_connection)
        work.send(1)

    assert made.total > 1, "it was sent again"
    assert [message.args for message in queued(broker)] == [(), (0,), (1,)]
    client.close()
    shared_redis.get().close()


def test_key_on_other_redis_expires_soon_without_its_message(settings: Settings, redis_client: redis.Redis) -> None:
    # D6, where one script cannot do both
    with (
        embedded.start(postgres=False) as servers,
        installed(settings.model_copy(update={"broker_url": servers.redis_url})) as broker,
    ):
        work: Actor[..., Any] = declared(broker, [], **executed())

        with redis_fault("enqueue", "before", crash), pytest.raises(Crash):
            work.send()

    (key,) = keys(redis_client, settings)
    assert 0 < redis_client.pttl(key) <= 5_000


#: A scheduler killed before or after its exchange with this number about a deduplication key.
_KILLED: Final = """
import sys
from redis.connection import AbstractConnection
from housekeeping.core.settings import Settings
from tests.integration.middleware.applications import at, scheduler, wake_up
from tests.faults import kill_myself
from tests.sentinel_servers import applications_client

number, where = int(sys.argv[1]), sys.argv[2]
seen, about_a_key = 0, False
send, read = AbstractConnection.send_packed_command, AbstractConnection.read_response

def send_packed_command(self, command, check_health=True):
    global seen, about_a_key
    about_a_key = b":dedup:" in (b"".join(command) if isinstance(command, list) else command)
    seen += about_a_key
    if about_a_key and (seen, where) == (number, "before"):
        kill_myself()
    send(self, command, check_health)

def read_response(self, *args, **options):
    try:
        return read(self, *args, **options)
    finally:
        if about_a_key and (seen, where) == (number, "after") and sys.exception() is None:
            kill_myself()

AbstractConnection.send_packed_command = send_packed_command
AbstractConnection.read_response = read_response
wake_up(scheduler(Settings.load(), idempotent=True, deduplicate="until_executed"), at(12))
"""


@pytest.fixture
def successor(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    """Return the scheduler that replaces a killed one; it has sent a tick before."""
    own = settings.model_copy(update={"database_url": None})
    broker = scheduler(own, idempotent=True, deduplicate="until_executed")
    wake_up(broker, at(11))
    StepWorker(broker).run()
    yield broker
    applications.close_all()


def kill_a_scheduler(environment: dict[str, str], where: Where) -> None:
    """Send the tick of noon in a process that is killed around its first exchange about a key."""
    without = {name: value for name, value in environment.items() if name != "HOUSEKEEPING_DATABASE_URL"}
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, "1", where],
        cwd=TOP,
        env=without | {name: os.environ[name] for name in ("PYTHONPATH", "BROKEN_TWIN") if name in os.environ},
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.slow
def test_scheduler_killed_before_sending_does_not_block_the_next_tick(
    successor: RedisBroker, environment: dict[str, str]
) -> None:
    # F5
    kill_a_scheduler(environment, "before")
    assert queued(successor) == []

    wake_up(successor, at(13))

    assert [message.options["tick"] for message in queued(successor)] == [at(13).isoformat()]


def test_scheduler_killed_after_sending_leaves_only_the_message(
    successor: RedisBroker, environment: dict[str, str], redis_client: redis.Redis, settings: Settings
) -> None:
    # F5: the sent tick runs, and the next one is its duplicate; two of them are never live
    kill_a_scheduler(environment, "after")
    assert len(queued(successor)) == 1
    assert [redis_client.pttl(key) > 3_500_000 for key in keys(redis_client, settings)] == [True]

    wake_up(successor, at(13))

    assert [message.options["tick"] for message in queued(successor)] == [at(12).isoformat()]
    StepWorker(successor).run()
    assert (queued(successor), keys(redis_client, settings)) == ([], [])
