"""Internals of Dramatiq and periodiq that the library relies on."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import dramatiq.cli
import dramatiq.middleware
import dramatiq.middleware.prometheus
import periodiq
import pytest
from dramatiq import Message, MessageProxy
from dramatiq.brokers import redis as redis_broker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import TimeLimit

import housekeeping
from housekeeping import Settings
from tests.internals.brokers import ReliableRedisBroker, dramatiq_internals
from tests.internals.core import SettingsError


class OverridesEnqueue(RedisBroker):
    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        return message


class OverridesTheLastStep(RedisBroker):
    def do_enqueue(self, *arguments: Any) -> None: ...


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Record the arguments of each call of the broker's dispatch script; none reaches a server."""
    seen: list[list[Any]] = []
    monkeypatch.setattr(
        RedisBroker, "_max_unpack_size_val", 4000
    )  # otherwise a process's first command queries the server
    return seen


def recording(broker: RedisBroker, calls: list[list[Any]]) -> RedisBroker:
    def dispatch(*, args: list[Any], keys: list[str]) -> list[bytes]:
        assert keys == [broker.namespace]
        calls.append(args)
        return []

    broker.scripts["dispatch"] = dispatch
    return broker


def a_message() -> Message[Any]:
    return Message("queue", "actor", (1,), {}, {}, message_id="m", message_timestamp=1)


def test_dispatch_arguments_equal_those_of_the_brokers_enqueue(
    calls: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = recording(RedisBroker(), calls)
    for module in (redis_broker, dramatiq_internals):
        monkeypatch.setattr(module, "current_millis", lambda: 7)
    monkeypatch.setattr(broker, "_should_do_maintenance", lambda command: 1)

    copy = broker.enqueue(a_message())

    redis_id = copy.options["redis_message_id"]
    assert calls == [dramatiq_internals.dispatch_arguments(broker, "enqueue", "queue", redis_id, copy.encode())]


def test_encoded_message_equals_that_of_its_own_method() -> None:
    message: Message[Any] = Message("queue", "actor", (1, "é"), {"by_name": [2]}, {"delay": None})

    assert dramatiq_internals.encode(message) == message.encode()
    assert dramatiq_internals.encode(MessageProxy(message)) == message.encode()


def test_brokers_enqueue_makes_the_copy_that_the_path_makes(
    calls: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = recording(RedisBroker(), calls)
    monkeypatch.setattr("dramatiq.brokers.redis.current_millis", lambda: 7)

    now, later = broker.enqueue(a_message()), broker.enqueue(a_message(), delay=5)

    assert (now.queue_name, set(now.options)) == ("queue", {"redis_message_id"})
    assert (later.queue_name, set(later.options)) == ("queue.DQ", {"redis_message_id", "eta"})
    assert later.options["eta"] == 12


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(RedisBroker, True), (ReliableRedisBroker, True), (OverridesEnqueue, False), (OverridesTheLastStep, False)],
)
def test_broker_that_overrides_its_enqueue_keeps_it(kind: type[RedisBroker], expected: bool) -> None:
    assert dramatiq_internals.enqueues_by_dispatch(kind()) is expected


def test_broker_whose_enqueue_was_replaced_keeps_the_replacement() -> None:
    broker = RedisBroker()
    vars(broker)["enqueue"] = dict

    assert not dramatiq_internals.enqueues_by_dispatch(broker)


def test_enqueue_command_of_the_script_writes_hash_and_list() -> None:
    script = Path(inspect.getfile(RedisBroker)).parent / "redis" / "dispatch.lua"

    lua = script.read_text()
    enqueue = lua[lua.index('if command == "enqueue" then') :]

    # `WITH_ENQUEUEING_MANY` adds further messages in the same way.
    assert 'redis.call("hset", queue_messages, message_id, message_data)' in enqueue
    assert 'redis.call("rpush", queue_full_name, message_id)' in enqueue


def test_unknown_dispatch_script_is_refused_at_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = RedisBroker()
    assert dramatiq_internals.dispatch_script(broker) is broker.scripts["dispatch"]
    monkeypatch.setattr(broker.scripts["dispatch"], "sha", "another")

    with pytest.raises(SettingsError, match=r"does not know \(SHA-1 another\); install the dramatiq"):
        housekeeping.install(broker, Settings(redis_url="redis://localhost"), workers=False)


def test_class_of_a_broker_can_be_changed() -> None:
    broker = RedisBroker()

    dramatiq_internals.change_class(broker, ReliableRedisBroker)

    assert isinstance(broker, ReliableRedisBroker)


def test_failed_message_keeps_its_exception() -> None:
    message, error = MessageProxy(a_message()), ValueError("why")

    assert dramatiq_internals.exception_of(message) is None
    message.stuff_exception(error)

    assert dramatiq_internals.exception_of(message) is error


def test_time_limit_uses_its_manager_for_deadlines() -> None:
    source = inspect.getsource(TimeLimit)

    for use in ("self.manager.start()", "self.manager.add_timeout(", "self.manager.remove_timeout("):
        assert use in source
    assert hasattr(TimeLimit().manager, "interval")


def test_metrics_page_has_a_handler() -> None:
    assert dramatiq_internals.metrics_handler() is dramatiq.middleware.prometheus._metrics_handler


def test_periodiqs_program_is_recognized_among_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> bool:
        return dramatiq_internals.called_by_periodiq()

    assert inspect.isfunction(periodiq.main)
    assert not dramatiq_internals.called_by_periodiq()

    monkeypatch.setattr(periodiq, "main", main)

    assert main()


@pytest.mark.parametrize(
    ("value", "expected"),
    [("housekeeping.app", True), ("housekeeping.app:broker", True), ("shop.app", False), ("housekeeping.apps", False)],
)
def test_import_of_the_broker_names_its_module(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_broker(value: str) -> bool:
        return dramatiq_internals.imported_as_broker("housekeeping.app")

    parameters = inspect.signature(dramatiq.cli.import_broker).parameters
    assert list(parameters) == ["value"]
    assert periodiq.import_broker is dramatiq.cli.import_broker
    assert not dramatiq_internals.imported_as_broker("housekeeping.app")

    monkeypatch.setattr(dramatiq.cli, "import_broker", import_broker)

    assert import_broker(value) is expected
