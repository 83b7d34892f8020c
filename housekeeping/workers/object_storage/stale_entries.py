"""Stale entries of pending uploads, by location."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from housekeeping.sweeps import UploadRefused
from housekeeping.workers.object_storage import stores
from housekeeping.workers.object_storage.pending_entry import Entry

#: Location -> path -> entry.
StaleEntries = dict[str, dict[str, Entry]]


def classify(entries: Iterable[Entry], first_fresh: int) -> tuple[StaleEntries, list[tuple[Entry, UploadRefused]]]:
    """Return the stale entries, and those that cannot be processed, which stay in the hash.

    Entries of a disabled store are ignored, whatever they contain.

    Parameters:
      first_fresh: The first second that is not stale.
    """
    stale: StaleEntries = {}
    refused: list[tuple[Entry, UploadRefused]] = []
    for entry in entries:
        seconds = entry.seconds
        if seconds is not None and seconds >= first_fresh:
            continue
        location = entry.location
        store = stores.configured.get(location)
        if store is not None and not store.enabled:
            continue
        try:
            path = entry.usable_path()
            if store is None:
                raise UploadRefused(f"HOUSEKEEPING_OBJECT_STORES has no location {location!r}")
        except UploadRefused as error:
            refused.append((entry, error))
        else:
            stale.setdefault(location, {})[path] = entry
    return stale, refused


def times(stale: StaleEntries) -> Iterator[tuple[datetime, str, str]]:
    """Yield time, location and path of each entry."""
    for location, entries in stale.items():
        for path, entry in entries.items():
            yield datetime.fromtimestamp(entry.seconds or 0, UTC), location, path


def some_of(stale: StaleEntries, most: int | None) -> dict[str, list[tuple[str, Entry]]]:
    """Return the entries of a batch in random order, as many as breaker and pace allow.

    Redis returns a page in the same order each time. If a slow store or slow failures use up the time, what comes after
    them would never be reached.
    """
    chosen: dict[str, list[tuple[str, Entry]]] = {}
    for location in random.sample(list(stale), len(stale)):
        entries = list(stale[location].items())
        left = len(entries) if most is None else max(0, most - number_of(chosen.values()))
        chosen[location] = random.sample(entries, min(left, len(entries)))
    return chosen


def number_of(by_location: Iterable[Sequence[Any] | dict[str, Entry]]) -> int:
    """Return the number of entries of all locations."""
    return sum(map(len, by_location))
