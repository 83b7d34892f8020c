"""Faults that grow with the number of messages. Each is a soak of its own.

They are planted in the hooks that every message passes, so that one fault is in as few lines as a real one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Final

import pytest
from dramatiq import Message, MessageProxy, Middleware

from housekeeping.core.middleware_errors import Skip
from housekeeping.core.redis.client import redis_client, shared_redis
from housekeeping.middleware import dead_letters
from housekeeping.middleware.deduplication.middleware import Deduplication
from housekeeping.middleware.idempotency import Idempotency
from housekeeping.middleware.telemetry.run_log import RunLog
from tests.twins import Twin

_TESTS: Final = "tests/soak/test_soak.py::"
_DAY_S: Final = 24 * 3600
_SOME: Final = 100  # one in this many messages, where every message would overload the machine

AnyMessage = Message[Any] | MessageProxy
_kept: Final[list[Any]] = []


def _twin(promise: str, test: str, breaks: Callable[[pytest.MonkeyPatch], None]) -> Twin:
    return Twin(promise, breaks.__name__.removeprefix("_"), _TESTS + test, breaks, in_processes=True)


def _besides(patch: pytest.MonkeyPatch, middleware: type[Middleware], does: Callable[[AnyMessage], object]) -> None:
    """Make a middleware do something else after each message."""
    hook = middleware.after_process_message

    def process(self: Any, broker: Any, message: MessageProxy, **how: Any) -> None:
        hook(self, broker, message, **how)
        does(message)

    patch.setattr(middleware, "after_process_message", process)


def _now_and_then(does: Callable[[], object]) -> Callable[[AnyMessage], object]:
    numbers = itertools.count()
    return lambda message: does() if next(numbers) % _SOME == 0 else None


def _name(kind: str, message: AnyMessage) -> str:
    return f"{shared_redis.namespace}:{kind}:{message.actor_name}:{message.message_id}"


def _drops_some_messages(patch: pytest.MonkeyPatch) -> None:
    before = RunLog.before_process_message

    def process(self: RunLog, broker: Any, message: MessageProxy) -> None:
        before(self, broker, message)
        if message.actor_name == "record" and message.args[0] % _SOME == 0:
            raise Skip("dropped")

    patch.setattr(RunLog, "before_process_message", process)


def _leaves_a_key_per_message(patch: pytest.MonkeyPatch) -> None:
    _besides(patch, Deduplication, lambda message: shared_redis.get().set(_name("dedup", message), "x", ex=600))


def _releases_no_key_at_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deduplication, "after_process_message", lambda *args, **how: None)


def _leaves_running_marks_behind(patch: pytest.MonkeyPatch) -> None:
    # Another name, so that no retry of the message waits for it.
    _besides(patch, Idempotency, lambda message: shared_redis.get().set(_name("running:left", message), "x", ex=60))


def _keeps_completions_forever(patch: pytest.MonkeyPatch) -> None:
    _besides(patch, Idempotency, lambda message: shared_redis.get().persist(_name("done", message)))


def _ignores_the_idempotency_ttl(patch: pytest.MonkeyPatch) -> None:
    _besides(patch, Idempotency, lambda message: shared_redis.get().expire(_name("done", message), _DAY_S))


def _keeps_all_dead_letters_of_a_schedule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dead_letters, "KEPT", 1000)


def _creates_a_broker_key_per_message(patch: pytest.MonkeyPatch) -> None:
    def key(message: AnyMessage) -> object:
        return shared_redis.get().set(f"{shared_redis.namespace}:broker:{message.message_id}", "x", ex=600)

    _besides(patch, RunLog, key)


def _remembers_every_message_id(patch: pytest.MonkeyPatch) -> None:
    _besides(patch, RunLog, lambda message: _kept.append(message.message_id))


def _remembers_every_message_body(patch: pytest.MonkeyPatch) -> None:
    _besides(patch, RunLog, lambda message: _kept.append(bytes(2000)))


def _never_ends_threads(patch: pytest.MonkeyPatch) -> None:
    def leave() -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    _besides(patch, RunLog, _now_and_then(leave))


def _opens_new_connections(patch: pytest.MonkeyPatch) -> None:
    def connect() -> None:
        ours = shared_redis.get().connection_pool.connection_kwargs
        client = redis_client(f"redis://{ours['host']}:{ours['port']}/{ours['db']}?client_name={ours['client_name']}")
        client.ping()
        _kept.append(client)

    _besides(patch, RunLog, _now_and_then(connect))


def _raises_in_a_hook(patch: pytest.MonkeyPatch) -> None:
    _besides(patch, RunLog, _now_and_then(lambda: 1 // 0))


TWINS: Final = [
    _twin("F10", "test_each_message_ends_once", _drops_some_messages),
    _twin(
        "D10",
        "test_there_are_at_most_as_many_keys_as_live_messages",
        _leaves_a_key_per_message,
    ),
    _twin("D10", "test_each_thread_has_at_most_one_mark_and_two_leases", _leaves_running_marks_behind),
    _twin("D10", "test_no_key_is_held_without_live_messages", _releases_no_key_at_the_end),
    _twin("D10", "test_every_library_key_has_a_ttl", _keeps_completions_forever),
    _twin("D10", "test_completions_expire_after_their_ttl", _ignores_the_idempotency_ttl),
    _twin(
        "R1",
        "test_failing_schedule_keeps_its_last_ten_dead_letters",
        _keeps_all_dead_letters_of_a_schedule,
    ),
    _twin("D10", "test_broker_keys_do_not_grow_in_number", _creates_a_broker_key_per_message),
    _twin("D10", "test_no_object_is_kept_per_message", _remembers_every_message_id),
    _twin("D10", "test_resident_memory_does_not_grow", _remembers_every_message_body),
    _twin("D10", "test_threads_and_open_files_do_not_grow", _never_ends_threads),
    _twin("D10", "test_each_thread_has_at_most_two_redis_connections", _opens_new_connections),
    _twin("D10", "test_worker_logs_no_hook_errors", _raises_in_a_hook),
]
