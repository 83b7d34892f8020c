"""Faults of the brokers: delivery (B1 to B3), on Redis and on RabbitMQ."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
from dramatiq import Message

from housekeeping.brokers import redis
from housekeeping.brokers.dead_letters.on_rabbitmq import RabbitmqDeadLetters
from housekeeping.brokers.rabbitmq import broker as rabbitmq
from housekeeping.brokers.rabbitmq import consumer
from housekeeping.brokers.rabbitmq.broker import ReliableRabbitmqBroker
from housekeeping.brokers.rabbitmq.consumer import ReliableConsumer
from housekeeping.brokers.redis import ReliableRedisBroker
from housekeeping.middleware.prefetch import Prefetch
from tests.twins import Twin
from tests.twins.planting import instead

_REDIS: Final = "tests/integration/brokers/redis/test_brokers.py::"
_LOST: Final = "tests/integration/brokers/redis/test_lost_deliveries.py::"
_SENDING: Final = "tests/integration/brokers/rabbitmq/test_sending.py::"
_DELIVERY: Final = "tests/integration/brokers/rabbitmq/test_delivery.py::"
_DEAD: Final = "tests/integration/brokers/rabbitmq/test_dead_letters.py::"


def _reads_all(body: bytes, queue_name: str) -> tuple[Message[Any] | None, str]:
    return Message.decode(body), ""


def _skips_validation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(redis, "_read", _reads_all)


def _does_not_harden_an_applications_broker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReliableRedisBroker, "adopt", staticmethod(lambda broker: None))


def _requeues_no_lost_deliveries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReliableRedisBroker, "requeue_lost_deliveries", lambda self, queue_name: None)


def _prefetches_two_per_thread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefetch, "before_worker_boot", lambda self, broker, worker: None)


def _sends_no_heartbeat_while_busy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(redis._Consumer, "_wait_for_a_thread", lambda self: None)


def _tries_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rabbitmq, "_ATTEMPTS", 1)


def _sends_without_publisher_confirms(patch: pytest.MonkeyPatch) -> None:
    prepare = ReliableRabbitmqBroker._prepare

    def unconfirmed(self: ReliableRabbitmqBroker, prefix: str) -> None:
        prepare(self, prefix)
        self.confirm_delivery = False

    patch.setattr(ReliableRabbitmqBroker, "_prepare", unconfirmed)


def _acknowledges_by_number_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReliableConsumer, "_is_from_here", lambda self, message: True)


def _accepts_every_message_that_decodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumer, "read", _reads_all)


def _keeps_delayed_messages_in_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rabbitmq, "level_for", lambda message: None)
    patch.setattr(consumer, "level_for", lambda message: None)


def _keeps_connections_of_ended_threads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReliableRabbitmqBroker, "_close_connections_of_ended_threads", lambda self: None)


class _GivesToEverybody(dict[Any, Any]):
    def pop(self, key: Any, default: Any = None) -> Any:
        return super().pop(key, True)


def _closes_connections_twice(patch: pytest.MonkeyPatch) -> None:
    prepare = ReliableRabbitmqBroker._prepare

    def to_everybody(self: ReliableRabbitmqBroker, prefix: str) -> None:
        prepare(self, prefix)
        self._owners = _GivesToEverybody()

    patch.setattr(ReliableRabbitmqBroker, "_prepare", to_everybody)


def _requeues_in_two_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pika.adapters.blocking_connection.BlockingChannel.tx_select", lambda self: None)


def _consumes_what_it_lists(patch: pytest.MonkeyPatch) -> None:
    read = RabbitmqDeadLetters._read

    def and_acknowledges(self: RabbitmqDeadLetters, channel: Any, queue: str) -> Any:
        found = read(self, channel, queue)
        for stored in found:
            channel.basic_ack(stored.tag)
        return found

    patch.setattr(RabbitmqDeadLetters, "_read", and_acknowledges)


TWINS: Final[list[Twin]] = [
    Twin(
        "B1",
        "never_requeues_lost_deliveries",
        _LOST + "test_delivery_lost_in_transit_is_repeated",
        _requeues_no_lost_deliveries,
        slow=True,
    ),
    Twin(
        "B1",
        "requeues_lost_deliveries_only_on_connect",
        _LOST + "test_delivery_after_the_client_gave_up_is_repeated",
        instead(redis, "_time_of_next_check", lambda: math.inf),
        slow=True,
    ),
    Twin(
        "B1",
        "sends_no_heartbeat_while_busy",
        _REDIS + "test_busy_process_is_not_considered_dead",
        _sends_no_heartbeat_while_busy,
    ),
    Twin(
        "B1",
        "tries_a_send_once",
        _SENDING + "test_send_over_a_lost_connection_is_repeated",
        _tries_once,
    ),
    Twin(
        "B1",
        "acknowledges_by_number_alone",
        _DELIVERY + "test_message_of_a_lost_connection_acknowledges_no_other",
        _acknowledges_by_number_alone,
    ),
    Twin(
        "B2",
        "prefetches_two_messages_per_thread",
        _REDIS + "test_message_behind_a_long_one_is_left_to_another_process",
        _prefetches_two_per_thread,
        slow=True,
    ),
    Twin(
        "B2",
        "sends_without_publisher_confirms",
        _SENDING + "test_deleted_queue_is_recreated_with_the_message_in_it",
        _sends_without_publisher_confirms,
    ),
    Twin(
        "B2",
        "keeps_delayed_messages_in_memory",
        _DELIVERY + "test_worker_does_not_hold_delayed_messages_for_long",
        _keeps_delayed_messages_in_memory,
    ),
    Twin(
        "B2",
        "keeps_connections_of_ended_threads",
        _SENDING + "test_ended_threads_leave_no_connection",
        _keeps_connections_of_ended_threads,
    ),
    Twin(
        "B2",
        "lets_two_threads_close_one_connection",
        _SENDING + "test_connection_of_an_ended_thread_is_closed_once",
        _closes_connections_twice,
    ),
    Twin(
        "B3",
        "skips_message_validation",
        _REDIS + "test_unreadable_message_affects_no_other",
        _skips_validation,
        slow=True,
    ),
    Twin(
        "B3",
        "does_not_harden_an_applications_broker",
        _REDIS + "test_unreadable_message_affects_no_other_on_an_applications_broker",
        _does_not_harden_an_applications_broker,
    ),
    Twin(
        "B3",
        "accepts_every_message_that_decodes",
        _DELIVERY + "test_decodable_but_invalid_message_affects_no_other",
        _accepts_every_message_that_decodes,
    ),
    Twin(
        "R6",
        "requeues_on_rabbitmq_in_two_steps",
        _DEAD + "test_requeue_that_fails_half_way_leaves_the_letter_in_place",
        _requeues_in_two_steps,
    ),
    Twin(
        "R6",
        "consumes_dead_letters_that_it_lists",
        _DEAD + "test_dead_letters_are_read_without_being_moved",
        _consumes_what_it_lists,
    ),
]
