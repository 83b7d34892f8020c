from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq import Broker, MessageProxy, Middleware
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AgeLimit, CurrentMessage, Retries, ShutdownNotifications, SkipMessage, TimeLimit
from dramatiq.middleware import default_middleware as dramatiqs
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from periodiq import PeriodiqMiddleware

import housekeeping
from housekeeping import Settings
from tests.integration.middleware.applications import close_all, eventually, queued, working
from tests.internals.core import DeclarationError, SettingsError
from tests.internals.middleware import ShutdownNotifications as OurShutdownNotifications
from tests.sentinel_servers import applications_client


class Prometheus(Middleware):
    """Stands in for Dramatiq's, which starts a server: what is in progress, by the hooks it has."""

    def __init__(self) -> None:
        self.in_progress = 0

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        self.in_progress += 1

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self.in_progress -= 1

    after_skip_message = after_process_message


class Early(Middleware):
    """Middleware that an application has put before Dramatiq's own."""


class Late(Middleware):
    """Middleware that an application has added."""


@pytest.fixture
def plain(settings: Settings, redis_client: redis.Redis) -> Settings:
    return settings.model_copy(update={"database_url": None})


@pytest.fixture
def broker(plain: Settings) -> Iterator[RedisBroker]:
    """An application's own broker, with what Dramatiq gives it."""
    client = applications_client(plain.require_redis_url())
    broker = RedisBroker(client=client, namespace=f"{plain.namespace}:own")
    yield broker
    client.close()
    from tests.internals.core import shared_redis

    if shared_redis.client is not None:
        shared_redis.client.close()
    close_all()


def order(broker: Broker) -> list[str]:
    return [type(middleware).__name__ for middleware in broker.middleware]


def kept(broker: Broker, kind: type[Middleware]) -> Any:
    [middleware] = [middleware for middleware in broker.middleware if isinstance(middleware, kind)]
    return middleware


def test_library_middleware_replaces_dramatiqs_of_each_kind_once(broker: RedisBroker, plain: Settings) -> None:
    housekeeping.install(broker, plain, workers=False)

    assert order(broker) == [
        "RunLog",
        "Traces",
        "AgeLimit",
        "Schedule",
        "Prefetch",
        "Heartbeats",
        "Metrics",
        "Connections",
        "DataConsistency",
        "Deduplication",
        "Admission",
        "Callbacks",
        "Pipelines",
        "DeadLetters",
        "Retries",
        "CheckIns",
        "TimeLimit",
        "ShutdownNotifications",
    ]


def test_an_applications_own_keep_their_side(broker: RedisBroker, plain: Settings) -> None:
    results, current = Results(backend=StubBackend()), CurrentMessage()
    broker.add_middleware(Early(), before=AgeLimit)
    for middleware in (Late(), Prometheus(), results, current, PeriodiqMiddleware()):
        broker.add_middleware(middleware)

    housekeeping.install(broker, plain, workers=False)

    names = order(broker)
    assert names[:3] == ["Early", "Prometheus", "RunLog"]
    assert names[-6:] == ["CheckIns", "Late", "Results", "CurrentMessage", "TimeLimit", "ShutdownNotifications"]
    assert "PeriodiqMiddleware" not in names


def test_settings_of_an_application_win_over_our_defaults(plain: Settings, redis_client: redis.Redis) -> None:
    def never(retries: int, error: BaseException) -> bool:
        return False

    limit, age = TimeLimit(time_limit=1000), AgeLimit(max_age=5000)
    retries = Retries(max_retries=3, min_backoff=100, retry_when=never)
    broker = StubBroker(middleware=[age, limit, ShutdownNotifications(notify_shutdown=True), retries])

    housekeeping.install(broker, plain, workers=False)

    assert (kept(broker, TimeLimit), kept(broker, AgeLimit)) == (limit, age)
    ours = kept(broker, Retries)
    assert (ours.max_retries, ours.min_backoff, ours.retry_when) == (3, 100, never)
    assert kept(broker, ShutdownNotifications).notify_shutdown is True


def test_dramatiqs_defaults_give_way_to_ours(plain: Settings, redis_client: redis.Redis) -> None:
    broker = StubBroker(middleware=[middleware() for middleware in dramatiqs])

    housekeeping.install(broker, plain, workers=False)

    assert kept(broker, Retries).max_retries == 25
    assert type(kept(broker, ShutdownNotifications)) is OurShutdownNotifications


def test_delays_that_an_application_set_are_used(broker: RedisBroker, plain: Settings) -> None:  # R1
    broker.middleware[:] = [Retries(min_backoff=1, max_backoff=2)]
    housekeeping.install(broker, plain, workers=False)
    runs = []

    @dramatiq.actor(broker=broker)
    def work() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise ValueError

    work.send()
    with working(broker):
        eventually(lambda: len(runs) == 3)


def test_metrics_add_up_when_ours_skip(broker: RedisBroker, plain: Settings) -> None:
    prometheus = Prometheus()
    broker.add_middleware(prometheus)
    housekeeping.install(broker, plain, workers=False)

    @dramatiq.actor(broker=broker, max_age=1)
    def old() -> None: ...

    old.send_with_options()
    with working(broker):
        eventually(lambda: not queued(broker))

    assert prometheus.in_progress == 0


def test_a_skip_by_an_applications_middleware_is_kept(broker: RedisBroker, plain: Settings) -> None:
    class Refuses(Middleware):
        def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
            raise SkipMessage

    broker.add_middleware(Refuses())
    housekeeping.install(broker, plain, workers=False)
    ran = threading.Event()

    @dramatiq.actor(broker=broker)
    def work() -> None:
        ran.set()

    work.send()
    with working(broker):
        eventually(lambda: not queued(broker))

    assert not ran.is_set()


def test_actors_declared_before_are_looked_after_too(broker: RedisBroker, plain: Settings) -> None:
    broker.actor_options |= {"periodic"}
    from periodiq import cron

    @dramatiq.actor(broker=broker, periodic=cron("0 0 * * 0"))
    def weekly() -> None: ...

    housekeeping.install(broker, plain, workers=False)

    assert type(weekly.options["periodic"]).__module__.startswith("housekeeping.")


def test_without_a_redis_url_everything_lives_on_the_brokers_server(broker: RedisBroker, plain: Settings) -> None:
    housekeeping.install(broker, plain.model_copy(update={"redis_url": None}), workers=False)

    from tests.internals.core import shared_redis

    assert shared_redis.client is broker.client


def test_a_second_installation_is_refused(broker: RedisBroker, plain: Settings) -> None:
    housekeeping.install(broker, plain, workers=False)

    with pytest.raises(DeclarationError, match="already"):
        housekeeping.install(broker, plain, workers=False)


def test_a_wrong_setting_leaves_the_broker_as_it_was(broker: RedisBroker, plain: Settings) -> None:
    before = order(broker)

    with pytest.raises(SettingsError):
        housekeeping.install(broker, plain, workers=True)

    assert order(broker) == before


def test_a_killed_workers_messages_come_back_soon_on_an_own_broker_too(broker: RedisBroker, plain: Settings) -> None:
    housekeeping.install(broker, plain, workers=False)  # B1, B2

    assert broker.maintenance_chance == 1_000_000
