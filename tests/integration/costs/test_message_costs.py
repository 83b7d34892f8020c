"""Round trips and Redis commands of a message, for each combination of protections and each way to send."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import dramatiq
import pytest
import redis

from housekeeping import Settings
from tests.integration.costs.round_trips import RoundTrips, round_trips
from tests.integration.middleware.step_worker import StepWorker, installed
from tests.internals.database import Database, connect_to, database

_COUNTS_REDIS: Final = pytest.mark.redis_broker_only(
    reason="it counts commands of Redis, which does not get RabbitMQ's messages"
)
_MESSAGES: Final = 10
_LEASE: Final = {"key": lambda number: f"k/{number}", "ttl": timedelta(minutes=10)}
_EXECUTED: Final = {"idempotent": True, "deduplicate": "until_executed"}


@pytest.fixture
def to_redis(settings: Settings, meter_client: redis.Redis) -> Iterator[RoundTrips]:
    with round_trips(settings.require_redis_url()) as counter:
        yield counter


@pytest.fixture
def broker(settings: Settings, to_redis: RoundTrips) -> Iterator[Any]:
    with installed(settings.model_copy(update={"redis_url": to_redis.url})) as installed_broker:
        yield installed_broker


@pytest.fixture
def to_postgres(settings: Settings, postgres: Database) -> Iterator[RoundTrips]:
    """Count the round trips of the library's connection, which is open."""
    there = database.obj
    with round_trips(settings.require_database_url()) as counter:
        database.initialize(connect_to(counter.url))
        database.connect()
        yield counter
        database.close()
        database.initialize(there)


class Meter:
    """Counts per message since the meter was made."""

    def __init__(self, trips: RoundTrips, client: redis.Redis) -> None:
        self._trips, self._client = trips, client
        self._before = (self._commands(), trips.count)

    def per_message(self) -> tuple[float, float]:
        """Return round trips and commands for each of the messages."""
        trips, commands = self._trips.count - self._before[1], self._commands() - self._before[0] - 1
        return trips / _MESSAGES, commands / _MESSAGES

    def _commands(self) -> int:
        stats: Any = self._client.info("stats")
        return int(stats["total_commands_processed"])


def actor(broker: Any, **options: Any) -> Any:
    def work(number: int) -> None:
        if number < 0:
            raise RuntimeError("as intended")

    return dramatiq.actor(broker=broker, actor_name="work", **options)(work)


#: Options -> round trips and Redis commands of a run, Dramatiq's acknowledgement among them. A script counts as one
#: command, and so does each command that it calls.
RUNS: Final[dict[str, tuple[dict[str, Any], float, float]]] = {
    "plain": ({}, 1, 5),
    "deduplicated": ({"idempotent": True}, 2, 13),
    "until_executed": (_EXECUTED, 2, 17),
    "under a lease": ({"exclusive_lease": _LEASE}, 2, 10),
    "both": ({"idempotent": True, "exclusive_lease": _LEASE}, 2, 17),
    "all": ({**_EXECUTED, "exclusive_lease": _LEASE}, 2, 21),
}


@_COUNTS_REDIS
@pytest.mark.parametrize("case", RUNS)
def test_run_takes_one_round_trip_beside_its_acknowledgement(
    broker: Any, to_redis: RoundTrips, meter_client: redis.Redis, case: str
) -> None:  # D10
    options, trips, commands = RUNS[case]
    work, step_worker = actor(broker, **options), StepWorker(broker)
    for number in range(_MESSAGES + 1):
        work.send(number)
    fetched = [step_worker.fetch() for _ in range(_MESSAGES + 1)]
    step_worker.run(fetched[0])  # loads the scripts

    meter = Meter(to_redis, meter_client)
    for message in fetched[1:]:
        step_worker.run(message)

    assert meter.per_message() == (trips, commands)


@pytest.mark.parametrize(("fenced", "trips"), [(False, 0), (True, 2)])
def test_lease_asks_the_database_only_if_it_is_fenced(  # L3
    broker: Any, to_postgres: RoundTrips, fenced: bool, trips: int
) -> None:
    work, step_worker = actor(broker, exclusive_lease={**_LEASE, "fenced": fenced}), StepWorker(broker)
    for number in range(_MESSAGES):
        work.send(number)
    before = to_postgres.count

    for _ in range(_MESSAGES):
        step_worker.run()

    assert to_postgres.count - before == trips * _MESSAGES


@_COUNTS_REDIS
def test_failed_message_takes_one_round_trip(broker: Any, to_redis: RoundTrips, meter_client: redis.Redis) -> None:
    work, step_worker = actor(broker, max_retries=0), StepWorker(broker)
    for number in range(_MESSAGES + 1):
        work.send(-1 - number)
    fetched = [step_worker.fetch() for _ in range(_MESSAGES + 1)]
    step_worker.run(fetched[0])

    meter = Meter(to_redis, meter_client)
    for message in fetched[1:]:
        step_worker.run(message)

    assert meter.per_message()[0] == 1


@_COUNTS_REDIS
@pytest.mark.parametrize(("options", "commands"), [({}, 7), ({"idempotent": True}, 11), (_EXECUTED, 11)])
def test_send_takes_one_round_trip(
    broker: Any, to_redis: RoundTrips, meter_client: redis.Redis, options: dict[str, Any], commands: float
) -> None:  # D6
    work = actor(broker, **options)
    work.send(0)

    meter = Meter(to_redis, meter_client)
    for number in range(1, _MESSAGES + 1):
        work.send(number)

    assert meter.per_message() == (1, commands)
