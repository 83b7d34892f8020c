"""Sending of messages: deduplicated and in bulk, against a loop of plain `send`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dramatiq import Broker

import housekeeping
from benchmarks.comparison import Comparison, Contestant, Place, Target
from benchmarks.messages import BARE, bare, empty, queued, whole, without_tables

_PLAIN: Final = "send, whole middleware"
_DEDUPLICATED: Final = "send, deduplicated"
_MANY: Final = "enqueue_many, deduplicated"
_MANY_PLAIN: Final = "enqueue_many"


def _sent(make: Callable[[Place], Broker], *, many: bool = False, **options: Any) -> Contestant:
    def ready(place: Place) -> Callable[[], object]:
        broker = make(place)
        actor = empty(broker, **options)
        broker.client.ping()  # type: ignore[attr-defined]

        def each() -> None:
            for number in range(place.rows):
                actor.send(number)

        def together() -> None:
            housekeeping.enqueue_many(actor, range(place.rows))

        return together if many else each

    return ready


def _unsent(place: Place) -> int:
    return place.rows - queued(place)


COMPARISONS: Final = (
    Comparison(
        name="sending",
        unit="messages",
        template="without_tables",
        fill=without_tables,
        undone=_unsent,
        rows=10_000,
        among=10_000,
        contestants={
            BARE: _sent(bare),
            _PLAIN: _sent(whole),
            _DEDUPLICATED: _sent(whole, idempotent=True),
            _MANY: _sent(whole, many=True, idempotent=True),
            _MANY_PLAIN: _sent(whole, many=True),
        },
        targets=(Target(_MANY, BARE, 6), Target(_DEDUPLICATED, BARE, 0.9)),
    ),
)
