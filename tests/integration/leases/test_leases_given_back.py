"""Release of leases while their server does not answer (L1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, cast

import pytest
import redis

from housekeeping import ExclusiveLease, Settings
from tests.faults import instead_of_pauses
from tests.integration.conftest import LoseLease
from tests.integration.metrics.conftest import Exported
from tests.integration.metrics.conftest import exported as exported
from tests.internals.core import DatabaseUnavailable, RedisUnavailable
from tests.internals.database import Database
from tests.internals.leases import LeaseStore, PostgresLeaseStore, RedisLeaseStore

TTL = timedelta(seconds=30)
KEY = "報告/夜"


class UnansweredStore:
    """Lease store that answers a release only after this many tries.

    Parameters:
      heard: Whether a try that gets no answer takes effect.
    """

    def __init__(self, store: LeaseStore, unanswered: int, heard: bool = False) -> None:
        self.tries, self._store, self._unanswered, self._heard = 0, store, unanswered, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def release(self, key: str, token: str) -> bool:
        self.tries += 1
        if self.tries > self._unanswered:
            return self._store.release(key, token)
        if self._heard:
            self._store.release(key, token)
        raise RedisUnavailable("reset") if isinstance(self._store, RedisLeaseStore) else DatabaseUnavailable("reset")


@pytest.fixture(params=["redis", "postgres"])
def store(request: pytest.FixtureRequest, postgres: Database, redis_client: redis.Redis, settings: Settings) -> Any:
    return PostgresLeaseStore() if request.param == "postgres" else RedisLeaseStore(redis_client, settings.namespace)


@pytest.fixture
def between_tries() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Has something happen in place of the pause between two tries."""
    with ExitStack() as stack:
        stack.enter_context(instead_of_pauses())
        yield lambda step: stack.enter_context(instead_of_pauses(step))


@pytest.fixture
def lost(exported: Exported) -> Callable[[], float | None]:
    """Returns how many leases of no worker were counted as lost; None without any."""
    return lambda: exported("housekeeping_leases_lost_total", worker="")


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.usefixtures("between_tries")
def test_lease_is_released_if_its_server_answers_the_third_try(
    store: LeaseStore,
    caplog: pytest.LogCaptureFixture,
    lost: Callable[[], float | None],
    heard: bool,
) -> None:
    with ExclusiveLease(KEY, TTL, cast(Any, UnansweredStore(store, 2, heard))) as lease:
        pass

    assert not lease.exists()
    assert (caplog.text, lost()) == ("", None)


def test_lease_released_without_an_answer_stays_with_its_next_holder(
    store: LeaseStore,
    between_tries: Callable[[Callable[[], object]], object],
    lost: Callable[[], float | None],
) -> None:
    lease, successor = (ExclusiveLease(KEY, TTL, cast(Any, UnansweredStore(store, 1, True))) for _ in range(2))
    between_tries(successor.try_obtain)
    lease.try_obtain()

    assert lease.cancel()
    assert successor.renew()
    assert lost() is None


def test_lease_with_another_holder_counts_as_lost(lost: Callable[[], float | None], lose_lease: LoseLease) -> None:
    lease, successor = (ExclusiveLease(KEY, TTL) for _ in range(2))
    lease.try_obtain()
    lose_lease(KEY)
    successor.try_obtain()

    assert not lease.cancel()
    assert successor.renew()
    assert lost() == 1


@pytest.mark.usefixtures("between_tries")
def test_lease_not_released_in_three_tries_stays_until_its_ttl_expires(store: LeaseStore) -> None:
    silent: Any = UnansweredStore(store, 3)
    lease = ExclusiveLease(KEY, TTL, silent)
    lease.try_obtain()

    with pytest.raises((RedisUnavailable, DatabaseUnavailable)):
        lease.cancel()

    assert silent.tries == 3
    assert timedelta() < (lease.remaining() or timedelta()) <= TTL
