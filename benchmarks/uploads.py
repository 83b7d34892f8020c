"""``object_storage.delete_stale_direct_uploads`` beside HSCAN, deletion, and one HDEL a page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

import redis

from benchmarks.comparison import FLOOR, LINES, OURS, Comparison, Place
from benchmarks.contestants import ours

_WORKER: Final = "object_storage.delete_stale_direct_uploads"
_HASH: Final = "pending_direct_uploads"
_PAGE: Final = 1_000
_LOCATION: Final = "uploads"
_FRESH: Final = 9  # fresh entries per stale one
_STALE_AFTER_S: Final = 3 * 3600
_FOLDERS: Final = 256


def _path(number: int) -> str:
    return f"{number % _FOLDERS:02x}/{number:08d}"


def _prepare(place: Place) -> None:
    """Create an object for each stale entry. Fresh entries have none yet."""
    for number in range(_FOLDERS):
        (place.store / f"{number:02x}").mkdir(parents=True)
    for number in range(place.rows):
        os.close(os.open(place.store / _path(number), os.O_CREAT))
    now = int(time.time())
    client: Any = redis.Redis.from_url(place.redis_url)
    for start in range(0, place.rows * (1 + _FRESH), 10_000):
        numbers = range(start, min(start + 10_000, place.rows * (1 + _FRESH)))
        ages = {number: _STALE_AFTER_S + 60 + number % 86_400 if number < place.rows else 60 for number in numbers}
        client.hset(_HASH, mapping={f"{_LOCATION}:{_path(number)}": now - age for number, age in ages.items()})
    client.close()


def _undone(place: Place) -> int:
    """Return the number of objects left, which must equal the number of entries.

    Raises:
      RuntimeError: When an object has gone and its entry has not, or the other way round.
    """
    client: Any = redis.Redis.from_url(place.redis_url)
    entries = client.hlen(_HASH) - place.rows * _FRESH
    client.close()
    objects = sum(len(files) for _, _, files in os.walk(place.store))
    if entries != objects:
        raise RuntimeError(f"{entries} stale entries are left, but {objects} objects")
    return objects


def _floor(place: Place) -> Callable[[], object]:
    client: Any = redis.Redis.from_url(place.redis_url)
    client.ping()
    prefix = len(_LOCATION) + 1
    folder = f"{place.store}/"

    def work() -> None:
        before = int(time.time()) - _STALE_AFTER_S
        cursor = 0
        while True:
            cursor, page = client.hscan(_HASH, cursor, count=_PAGE)
            stale = [field for field, value in page.items() if int(value) < before]
            for field in stale:
                os.unlink(folder + field[prefix:].decode())
            if stale:
                client.hdel(_HASH, *stale)
            if not cursor:
                return

    return work


COMPARISONS: Final = (
    Comparison(
        name="uploads",
        unit="uploads",
        undone=_undone,
        prepare=_prepare,
        rows=20_000,
        among=200_000,
        contestants={FLOOR: _floor, OURS: ours(_WORKER), LINES: ours(_WORKER, lines=True)},
        targets={OURS: 0.8},
    ),
)
