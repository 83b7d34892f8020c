"""Fixtures of the tests that take a worker's steps one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from housekeeping.core.settings import Settings
from tests.integration.middleware.hands import Hands, installed
from tests.integration.middleware.redis_broker_only import REASONS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that are about Redis as the broker."""
    for item in items:
        name = f"{item.path.name}::{item.name}"
        reason = REASONS.get(name) or REASONS.get(name.partition("[")[0])
        if reason is not None and item.path.parent.name == "middleware":
            item.add_marker(pytest.mark.redis_broker_only(reason=reason))


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    """A broker with the library's middleware and no database."""
    with installed(settings) as broker:
        yield broker


@pytest.fixture
def hands(broker: Any) -> Hands:
    return Hands(broker)


@pytest.fixture
def runs() -> list[Any]:
    """What the actors of a test did."""
    return []
