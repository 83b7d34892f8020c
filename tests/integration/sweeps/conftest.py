"""Fixtures of the tests of the breaker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.sweeps.engine.sizing import past_runs
from tests.internals.engine import guard

#: Adds runs that ended before, with the number of rows that each processed.
History = Callable[..., None]


@pytest.fixture
def history(statuses: type[UserStatus]) -> History:
    return past_runs


@pytest.fixture
def low_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten records are enough to trip a breaker."""
    monkeypatch.setattr(guard, "FLOOR", 10)
