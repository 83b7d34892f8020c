"""Log lines of messages, and the log context of a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
import redis
import structlog
from dramatiq import Broker, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Shutdown, SkipMessage, default_middleware

from housekeeping import Settings
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working
from tests.internals.core import DeclarationError, current_message
from tests.internals.middleware import OPTIONS


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[RedisBroker]:
    yield installed(settings.model_copy(update={"database_url": None}))
    close_all()


class Meddling(Middleware):
    """Middleware that does what the message says, in the hooks around the run."""

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if message.options.get("meddle") == "skip":
            raise SkipMessage("not today")

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if message.options.get("meddle") == "break":
            raise RuntimeError("a hook that fails")
        if message.options.get("meddle") == "interrupt" and exception is None:
            raise Shutdown


@pytest.mark.parametrize("meddle", ["nothing", "skip", "break", "interrupt", "fail"])
def test_log_context_of_a_message_does_not_reach_the_next(broker: RedisBroker, meddle: str) -> None:
    broker.add_middleware(Meddling())
    seen: list[tuple[dict[str, Any], Any]] = []
    threads: set[int] = set()

    @dramatiq.actor(broker=broker, feature_category="one_thing", data_consistency="sticky", max_retries=0)
    def first() -> None:
        threads.add(threading.get_ident())
        structlog.contextvars.bind_contextvars(run_id=7)
        if meddle == "fail":
            raise ValueError

    @dramatiq.actor(broker=broker)
    def second() -> None:
        threads.add(threading.get_ident())
        seen.append((structlog.contextvars.get_contextvars(), current_message.get()))

    first.send_with_options(meddle=meddle)
    message = second.send()
    with working(broker):
        eventually(lambda: seen)

    assert seen[0][0] == {"worker": "second", "message_id": message.message_id}
    assert seen[0][1].message_id == message.message_id
    assert len(threads) == 1


def test_log_context_is_empty_between_two_messages(broker: RedisBroker) -> None:
    class Last(Middleware):
        def after_ack(self, broker: Broker, message: MessageProxy) -> None:
            after.append((structlog.contextvars.get_contextvars(), current_message.get()))

    after: list[tuple[dict[str, Any], Any]] = []
    broker.add_middleware(Last())

    @dramatiq.actor(broker=broker, feature_category="one_thing")
    def work() -> None: ...

    work.send()
    with working(broker):
        eventually(lambda: after)

    assert after == [({}, None)]


def test_skip_by_an_earlier_middleware_is_logged_with_its_name(
    broker: RedisBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    broker.middleware.insert(0, Meddling())

    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    work.send_with_options(meddle="skip")
    with working(broker):
        eventually(lambda: not queued(broker))

    [line] = [vars(record) for record in caplog.records if record.getMessage() == "Run ended"]
    assert (line["worker"], line["outcome"], line["reason"]) == ("work", "skipped", "not today")


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({}, "DEBUG"),
        ({"max_retries": 3, "time_limit": 60_000, "throws": ValueError}, "DEBUG"),
        ({"idempotent": True}, "INFO"),
        ({"feature_category": "books"}, "INFO"),
        ({"schedule": "0 3 * * *"}, "INFO"),
    ],
)
def test_run_lines_of_actors_without_library_options_are_debug(
    broker: RedisBroker, caplog: pytest.LogCaptureFixture, options: dict[str, Any], level: str
) -> None:
    caplog.set_level("DEBUG")

    @dramatiq.actor(broker=broker, **options)
    def work() -> None: ...

    work.send()
    with working(broker):
        eventually(lambda: not queued(broker))

    lines = [record for record in caplog.records if record.getMessage() in ("Run started", "Run ended")]
    assert [(record.getMessage(), record.levelname) for record in lines] == [
        ("Run started", level),
        ("Run ended", level),
    ]


def test_options_lists_every_actor_option_of_the_library(broker: RedisBroker) -> None:
    dramatiqs = {name for kind in default_middleware for name in kind().actor_options}

    # The broker has two options of its own.
    assert broker.actor_options - dramatiqs - {"queue_name", "priority"} == OPTIONS


def test_unknown_data_consistency_is_refused_with_the_valid_values(broker: RedisBroker) -> None:
    with pytest.raises(DeclarationError, match="it should be one of always, sticky, delayed"):

        @dramatiq.actor(broker=broker, data_consistency="eventual")
        def work() -> None: ...
