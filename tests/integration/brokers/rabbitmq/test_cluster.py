"""Quorum queues on a cluster of three nodes, of which any one is killed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.errors import ConnectionClosed

from housekeeping import Settings, install
from tests.integration.middleware.applications import close_all, eventually, working
from tests.internals.brokers import message_broker
from tests.internals.doctor import servers
from tests.rabbitmq_server import Node, cluster

pytestmark = pytest.mark.slow
#: More than the time in which a queue chooses another leader.
MESSAGES = 300


@pytest.fixture(scope="module")
def nodes(request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    if request.config.getoption("broker") != "rabbitmq":
        pytest.skip("RabbitMQ was not asked for: --broker=rabbitmq")
    if shutil.which("rabbitmq-server") is None:
        pytest.skip("rabbitmq-server is not installed")
    with cluster(3) as running:
        yield running


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_any_node_that_is_killed_costs_no_message(
    nodes: list[Node], settings: Settings, redis_client: Any, postgres: Any, killed: int
) -> None:
    urls = ";".join(each.url for each in nodes)
    given = settings.model_copy(update={"broker_url": urls, "rabbitmq_queue_type": "quorum"})
    broker: Any = message_broker(given)
    install(broker, given, workers=False)
    done: set[int] = set()
    half = threading.Event()

    @dramatiq.actor(broker=broker, max_retries=3)
    def note(number: int) -> None:
        done.add(number)
        if len(done) > MESSAGES // 3:
            half.set()

    def send(number: int) -> None:
        """Send the message, and again if it was not accepted."""
        try:
            note.send(number)
        except ConnectionClosed:
            note.send(number)

    try:
        with working(broker):
            for number in range(MESSAGES):
                send(number)
                if number == MESSAGES // 2:
                    assert half.wait(60)
                    nodes[killed].kill()
            eventually(lambda: len(done) == MESSAGES)
    finally:
        broker.close()
        close_all()
        nodes[killed].start()

    assert done == set(range(MESSAGES))


@pytest.mark.parametrize(
    ("queue_type", "level", "text"),
    [("classic", "warning", "3 nodes, but each classic queue"), ("quorum", "fine", "quorum queues")],
)
def test_classic_queues_on_several_nodes_are_a_warning(
    nodes: list[Node], settings: Settings, postgres: Any, redis_client: Any, queue_type: str, level: str, text: str
) -> None:
    urls = ";".join(each.url for each in nodes)
    given = settings.model_copy(update={"broker_url": urls, "rabbitmq_queue_type": queue_type})

    found = [each for each in servers.examine_broker(given, {}) if each.subject in ("queues", "defaults")]

    assert [(each.level, text in each.text, "3 nodes" in each.text) for each in found] == [(level, True, True)]
