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


def _takes_all_for_sound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(redis, "_read", _reads_all)


def _leaves_an_own_broker_as_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReliableRedisBroker, "adopt", staticmethod(lambda broker: None))


def _requeues_no_strays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReliableRedisBroker, "requeue_lost_deliveries", lambda self, queue_name: None)


def _takes_two_a_thread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefetch, "before_worker_boot", lambda self, broker, worker: None)


def _says_nothing_while_its_hands_are_full(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(redis._Consumer, "_wait_for_a_thread", lambda self: None)


def _tries_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rabbitmq, "_ATTEMPTS", 1)


def _sends_unconfirmed(patch: pytest.MonkeyPatch) -> None:
    prepare = ReliableRabbitmqBroker._prepare

    def unconfirmed(self: ReliableRabbitmqBroker, prefix: str) -> None:
        prepare(self, prefix)
        self.confirm_delivery = False

    patch.setattr(ReliableRabbitmqBroker, "_prepare", unconfirmed)


def _acknowledges_by_number_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReliableConsumer, "_is_from_here", lambda self, message: True)


def _reads_whatever_decodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumer, "read", _reads_all)


def _keeps_far_messages_in_memory(patch: pytest.MonkeyPatch) -> None:
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


def _takes_what_it_reads(patch: pytest.MonkeyPatch) -> None:
    fetched = RabbitmqDeadLetters._fetched

    def and_acknowledges(self: RabbitmqDeadLetters, channel: Any, queue: str) -> Any:
        for tag, letter in fetched(self, channel, queue):
            channel.basic_ack(tag)
            yield tag, letter

    patch.setattr(RabbitmqDeadLetters, "_fetched", and_acknowledges)


TWINS: Final[list[Twin]] = [
    Twin(
        "B1",
        "leaves_lost_deliveries_with_their_process",
        _LOST + "test_delivery_lost_in_transit_is_repeated",
        _requeues_no_strays,
        slow=True,
    ),
    Twin(
        "B1",
        "looks_for_strays_when_it_connects_only",
        _LOST + "test_delivery_after_the_client_gave_up_is_repeated",
        instead(redis, "_time_of_next_check", lambda: math.inf),
        slow=True,
    ),
    Twin(
        "B1",
        "says_nothing_while_its_hands_are_full",
        _REDIS + "test_busy_process_is_not_considered_dead",
        _says_nothing_while_its_hands_are_full,
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
        "takes_two_messages_a_thread",
        _REDIS + "test_message_behind_a_long_one_is_left_to_another_process",
        _takes_two_a_thread,
        slow=True,
    ),
    Twin(
        "B2",
        "sends_unconfirmed",
        _SENDING + "test_deleted_queue_is_recreated_with_the_message_in_it",
        _sends_unconfirmed,
    ),
    Twin(
        "B2",
        "keeps_far_messages_in_memory",
        _DELIVERY + "test_worker_does_not_hold_delayed_messages_for_long",
        _keeps_far_messages_in_memory,
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
        "takes_every_message_for_sound",
        _REDIS + "test_unreadable_message_affects_no_other",
        _takes_all_for_sound,
        slow=True,
    ),
    Twin(
        "B3",
        "leaves_an_own_broker_as_it_is",
        _REDIS + "test_unreadable_message_affects_no_other_on_an_applications_broker",
        _leaves_an_own_broker_as_it_is,
    ),
    Twin(
        "B3",
        "reads_whatever_decodes",
        _DELIVERY + "test_decodable_but_invalid_message_affects_no_other",
        _reads_whatever_decodes,
    ),
    Twin(
        "R6",
        "requeues_on_rabbitmq_in_two_steps",
        _DEAD + "test_requeue_that_fails_half_way_leaves_the_letter_in_place",
        _requeues_in_two_steps,
    ),
    Twin(
        "R6",
        "takes_what_it_reads_from_rabbitmq",
        _DEAD + "test_dead_letters_are_read_without_being_moved",
        _takes_what_it_reads,
    ),
]
