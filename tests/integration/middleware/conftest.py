"""Fixtures of the tests that run a worker step by step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from housekeeping import Settings
from tests.integration.middleware.redis_broker_only import REASONS
from tests.integration.middleware.step_worker import StepWorker, installed

_HERE: Final = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need Redis as the broker."""
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        name = f"{item.path.relative_to(_HERE)}::{item.name}"
        reason = REASONS.get(name) or REASONS.get(name.partition("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.redis_broker_only(reason=reason))


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    """Yield a broker with the library's middleware and no database."""
    with installed(settings) as broker:
        yield broker


@pytest.fixture
def step_worker(broker: Any) -> StepWorker:
    return StepWorker(broker)


@pytest.fixture
def runs() -> list[Any]:
    """Return the list in which a test's actors record their runs."""
    return []
