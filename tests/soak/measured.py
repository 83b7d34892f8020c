"""Measurements of a process and of the library's keys in Redis."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import psutil
import redis

_MEGABYTE: Final = 1024 * 1024
_AT_ONCE: Final = 1000  # keys per round trip


@dataclass(frozen=True, slots=True)
class Measured:
    """Resources of a process at one time.

    Attributes:
      blocks: Blocks of memory that Python's own objects are in: one more for each text, list or dict that is kept.
      resident_mb: What the system has given it.
      descriptors: Open files and connections.
    """

    blocks: int
    resident_mb: float
    threads: int
    descriptors: int

    def as_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)


def measured() -> Measured:
    """Measure this process after a garbage collection."""
    gc.collect()
    process = psutil.Process()
    return Measured(
        sys.getallocatedblocks(),
        process.memory_info().rss / _MEGABYTE,
        threading.active_count(),
        process.num_fds(),
    )


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys by kind, such as ``dedup`` or ``done:record``: number, number without ttl, longest ttl."""

    number: dict[str, int]
    without_ttl: dict[str, int]
    longest_ttl_s: dict[str, float]


def keys_of(client: redis.Redis, namespace: str) -> Keys:
    """Return the keys of the namespace by kind."""
    number: Counter[str] = Counter()
    without_ttl: Counter[str] = Counter()
    longest: dict[str, float] = {}
    found: list[bytes] = []

    def look() -> None:
        with client.pipeline(transaction=False) as pipeline:
            for key in found:
                pipeline.pttl(key)
            for key, ttl in zip(found, pipeline.execute(), strict=True):
                kind = _kind(key.decode().removeprefix(f"{namespace}:"))
                number[kind] += ttl != -2  # -2: expired meanwhile
                without_ttl[kind] += ttl == -1
                longest[kind] = max(longest.get(kind, 0), ttl / 1000)
        found.clear()

    for key in client.scan_iter(match=f"{namespace}:*", count=_AT_ONCE):
        found.append(key)
        if len(found) == _AT_ONCE:
            look()
    look()
    return Keys(dict(+number), dict(+without_ttl), longest)


def _kind(name: str) -> str:
    kind, _, rest = name.partition(":")
    return f"{kind}:{rest.partition(':')[0]}" if kind in ("done", "broker") else kind


def slope(numbers: Sequence[float], places: Sequence[float]) -> float:
    """Return the growth of the numbers per position, by least squares."""
    middle = sum(places) / len(places)
    mean = sum(numbers) / len(numbers)
    spread = sum((place - middle) ** 2 for place in places)
    return sum((place - middle) * (number - mean) for place, number in zip(places, numbers, strict=True)) / spread
