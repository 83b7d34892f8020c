"""Release of leases while Redis does not answer (L1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
import redis

from housekeeping import ExclusiveLease, Settings
from tests.faults import instead_of_pauses
from tests.integration.conftest import LoseLease
from tests.integration.metrics.conftest import Exported
from tests.integration.metrics.conftest import exported as exported
from tests.internals.core import RedisUnavailable
from tests.internals.leases import RedisLeaseStore

TTL = timedelta(seconds=30)
KEY = "報告/夜"


class UnansweredStore(RedisLeaseStore):
    """Answers a release only after this many tries.

    Parameters:
      heard: Whether a try that gets no answer takes effect.
    """

    def __init__(self, client: redis.Redis, settings: Settings, unanswered: int, heard: bool = False) -> None:
        super().__init__(client, settings.namespace)
        self.tries, self._unanswered, self._heard = 0, unanswered, heard

    def release(self, key: str, token: str) -> bool:
        self.tries += 1
        if self.tries > self._unanswered:
            return super().release(key, token)
        if self._heard:
            super().release(key, token)
        raise RedisUnavailable("connection reset")


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
def test_lease_is_released_if_redis_answers_the_third_try(
    redis_client: redis.Redis,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    lost: Callable[[], float | None],
    heard: bool,
) -> None:
    with ExclusiveLease(KEY, TTL, UnansweredStore(redis_client, settings, 2, heard)) as lease:
        pass

    assert not lease.exists()
    assert (caplog.text, lost()) == ("", None)


def test_lease_released_without_an_answer_stays_with_its_next_holder(
    redis_client: redis.Redis,
    settings: Settings,
    between_tries: Callable[[Callable[[], object]], object],
    lost: Callable[[], float | None],
) -> None:
    lease, successor = (ExclusiveLease(KEY, TTL, UnansweredStore(redis_client, settings, 1, True)) for _ in range(2))
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
def test_lease_not_released_in_three_tries_stays_until_its_ttl_expires(
    redis_client: redis.Redis, settings: Settings
) -> None:
    store = UnansweredStore(redis_client, settings, 3)
    lease = ExclusiveLease(KEY, TTL, store)
    lease.try_obtain()

    with pytest.raises(RedisUnavailable):
        lease.cancel()

    assert store.tries == 3
    assert timedelta() < (lease.remaining() or timedelta()) <= TTL
