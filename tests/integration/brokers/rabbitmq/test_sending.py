"""Sends to RabbitMQ over connections that break."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Message, Middleware
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.errors import ConnectionClosed

from housekeeping import Settings, install
from tests.integration.brokers.rabbitmq.conftest import cut
from tests.integration.middleware.applications import queued
from tests.internals.brokers import (
    QueueDeclaredOtherwise,
    ReliableRabbitmqBroker,
    close_connection,
    harden,
    message_broker,
    queue_lengths,
)
from tests.internals.brokers import broker as rabbitmq
from tests.internals.core import shared_redis
from tests.rabbitmq_look import remove
from tests.rabbitmq_server import free_ports

FORKING = """
import os, dramatiq
from housekeeping.brokers import message_broker
from housekeeping.core.settings import Settings

broker = message_broker(Settings.load())
work = dramatiq.actor(broker=broker, actor_name="work")(lambda who: None)
work.send("parent, before")
if not os.fork():
    work.send("child")
    broker.close()
    os._exit(0)
assert os.wait()[1] == 0
work.send("parent, after")
broker.close()
"""


HARDENING = """
import sys, dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from housekeeping.brokers import harden
from tests.rabbitmq_look import remove

url, queue = sys.argv[1:]
for hardened in (False, True):
    broker = RabbitmqBroker(url=url, middleware=[])
    if hardened:
        harden(broker)
    dramatiq.actor(broker=broker, actor_name="work", queue_name=queue)(lambda: None).send()
remove(broker)
"""


class Counting(Middleware):
    """Middleware that counts messages and calls the test's function."""

    def __init__(self, meanwhile: Any = None) -> None:
        self.before: list[str] = []
        self.after: list[str] = []
        self._meanwhile = meanwhile

    def before_enqueue(self, broker: Any, message: Message[Any], delay: int | None) -> None:
        self.before.append(message.message_id)
        if self._meanwhile is not None:
            self._meanwhile()

    def after_enqueue(self, broker: Any, message: Message[Any], delay: int | None) -> None:
        self.after.append(message.message_id)


class Ended(threading.Thread):
    """Ended thread that two others detect at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)

    def is_alive(self) -> bool:
        self._both.wait(timeout=60)
        return False


def in_threads(*steps: Callable[[], object]) -> None:
    threads = [threading.Thread(target=step) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)


def actor(broker: Any) -> dramatiq.Actor[..., Any]:
    return dramatiq.actor(broker=broker, actor_name="work")(lambda *arguments: None)


def test_send_over_a_lost_connection_is_repeated(broker: Any) -> None:
    work = actor(broker)
    work.send(1)

    cut(broker.connection)
    work.send(2)

    assert [message.args for message in queued(broker)] == [(1,), (2,)]


def test_hooks_see_a_message_once_however_often_it_is_sent(broker: Any) -> None:
    work = actor(broker)
    work.send()
    counting = Counting(lambda: cut(broker.connection))
    broker.add_middleware(counting)

    message = work.send()

    assert counting.before == counting.after == [message.message_id]
    assert len(queued(broker)) == 2


def test_deleted_queue_is_recreated_with_the_message_in_it(broker: Any) -> None:
    work = actor(broker)
    work.send(1)

    broker.channel.queue_delete(broker.physical("default"))
    work.send(2)

    assert [message.args for message in queued(broker)] == [(2,)]


def test_no_key_is_reserved_while_rabbitmq_is_unavailable(settings: Settings) -> None:
    [port] = free_ports(1)
    broker = message_broker(settings.model_copy(update={"broker_url": f"amqp://who:secret@127.0.0.1:{port}/"}))
    counting = Counting()
    broker.add_middleware(counting)

    with pytest.raises(ConnectionClosed) as refused:
        actor(broker).send()

    assert counting.before == []
    assert "Connection refused" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_queue_with_conflicting_arguments_is_named(broker: Any) -> None:
    broker.channel.queue_declare(broker.physical("default.XQ"), durable=True, arguments={"x-message-ttl": 5})

    with pytest.raises(QueueDeclaredOtherwise, match="other arguments: .*x-message-ttl.*HOUSEKEEPING_NAMESPACE"):
        actor(broker).send()


def test_namespaces_of_two_applications_are_separate(broker: Any, settings: Settings) -> None:
    other = message_broker(settings.model_copy(update={"namespace": f"{settings.namespace}-other"}))
    actor(broker).send("ours")
    actor(other).send("theirs")

    assert [message.args for message in queued(broker)] == [("ours",)]
    remove(other)


def test_ended_threads_leave_no_connection(broker: Any) -> None:
    work = actor(broker)
    for _ in range(5):
        in_threads(work.send)

    assert len(queued(broker)) == 5
    assert len(broker.connections) == 1, "this thread's own"


def test_connection_of_an_ended_thread_is_closed_once(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work, closed = actor(broker), list[Any]()
    in_threads(lambda: work.send("ended"))
    [left] = broker.connections
    broker._owners[left] = Ended()

    def close_once(connection: Any) -> None:
        closed.append(connection)
        if closed.count(connection) == 1:
            close_connection(connection)

    monkeypatch.setattr(rabbitmq, "close_connection", close_once)
    in_threads(*[lambda: work.send("alive")] * 2)

    assert closed.count(left) == 1
    assert [message.args for message in queued(broker)] == [("ended",), ("alive",), ("alive",)]


def test_forked_child_sends_on_its_own_connection(broker: Any, environment: dict[str, str]) -> None:
    actor(broker)

    ended = subprocess.run([sys.executable, "-c", FORKING], env=environment, capture_output=True, text=True, timeout=60)

    assert ended.returncode == 0, ended.stderr
    assert [message.args[0] for message in queued(broker)] == ["parent, before", "child", "parent, after"]


def test_applications_own_broker_is_upgraded_in_place(amqp_url: str, settings: Settings) -> None:
    own = RabbitmqBroker(url=amqp_url, middleware=[])
    queue = f"{settings.namespace}_own"
    work = dramatiq.actor(broker=own, actor_name="work", queue_name=queue)(lambda: None)
    work.send()

    harden(own)
    own.channel.queue_delete(queue)
    work.send()

    hardened: Any = own
    assert isinstance(own, ReliableRabbitmqBroker)
    assert [message.queue_name for message in queued(hardened, queue)] == [queue]
    remove(hardened)


def test_applications_own_broker_keeps_its_dead_letter_ttl(
    amqp_url: str, settings: Settings, environment: dict[str, str]
) -> None:
    program = [sys.executable, "-c", HARDENING, amqp_url, f"{settings.namespace}_own"]
    a_day = environment | {"dramatiq_dead_message_ttl": "86400000"}

    ended = subprocess.run(program, env=a_day, capture_output=True, text=True, timeout=60)

    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def own(amqp_url: str, settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    """Return an application's own broker with the library installed."""
    own: Any = RabbitmqBroker(url=amqp_url, middleware=[])
    install(own, settings.model_copy(update={"database_url": None}), workers=False)
    yield own
    remove(own)
    shared_redis.get().close()


def test_hooks_of_an_upgraded_broker_see_a_message_once(own: Any, settings: Settings) -> None:
    queue = f"{settings.namespace}_own"
    work = dramatiq.actor(broker=own, actor_name="work", queue_name=queue)(lambda: None)
    work.send()
    counting = Counting(lambda: cut(own.connection))
    own.add_middleware(counting)

    message = work.send()

    assert counting.before == counting.after == [message.message_id]
    assert len(queued(own, queue)) == 2


def test_far_message_of_an_upgraded_broker_waits_in_rabbitmq(own: Any, settings: Settings) -> None:
    queue = f"{settings.namespace}_own"
    work = dramatiq.actor(broker=own, actor_name="work", queue_name=queue)(lambda: None)

    work.send_with_options(delay=3_600_000)

    assert own.channel.queue_declare(f"{queue}.DQ", passive=True).method.message_count == 0
    assert len(queued(own, f"{queue}.DQ")) == 1, "in a queue of its length of time"


def test_queue_lengths_omit_missing_queues(broker: Any, settings: Settings) -> None:
    work = actor(broker)
    work.send()
    for delay in (30_000, 3_600_000, 400_000_000):
        work.send_with_options(delay=delay)
    broker.bury("default", b"{")

    lengths = queue_lengths(settings, ["default", "unheard_of"])

    counted = {name: (each.waiting, each.delayed, each.dead) for name, each in lengths.items()}
    assert counted == {"default": (1, 3, 1), "unheard_of": (0, 0, 0)}


def test_connection_options_of_the_url_win(settings: Settings) -> None:
    urls = "amqp://host/?heartbeat=7;amqp://other/"
    broker: Any = message_broker(settings.model_copy(update={"broker_url": urls}))

    given, ours = broker.parameters
    assert (given.heartbeat, ours.heartbeat) == (7, 30)
    assert (given.host, ours.host) == ("host", "other")
    assert ours.blocked_connection_timeout == 30


def test_one_reachable_node_of_several_is_enough(settings: Settings, amqp_url: str) -> None:
    [port] = free_ports(1)
    urls = f"amqp://who:secret@127.0.0.1:{port}/;{amqp_url}"
    broker: Any = message_broker(settings.model_copy(update={"broker_url": urls}))

    actor(broker).send(1)

    assert [message.args for message in queued(broker)] == [(1,)]
    remove(broker)
