"""Fixtures of the tests of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from blinker import NamedSignal

from housekeeping import events
from tests.integration.events.orders import Notice, Order, fill
from tests.internals.database import Database

#: Registers a handler for the test.
On = Callable[..., None]


@pytest.fixture
def orders(postgres: Database) -> type[Order]:
    """Ten orders that have expired, with the ids 1 to 10, and one that has not."""
    postgres.create_tables([Order, Notice])
    fill()
    return Order


@pytest.fixture
def on() -> Iterator[On]:
    registered: list[tuple[NamedSignal, Any]] = []

    def register(event: NamedSignal, handler: Any, **how: Any) -> None:
        events.on(event, handler, **how)
        registered.append((event, handler))

    yield register
    for event, handler in registered:
        events.off(event, handler)
