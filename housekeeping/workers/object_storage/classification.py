"""Which entries are stale, which cannot be settled, and which are nobody's business yet; by one rule for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from housekeeping.core.errors import UploadRefused
from housekeeping.workers.object_storage.pending_entry import Entry, epoch_seconds
from housekeeping.workers.object_storage.stores import ObjectStore


@dataclass(slots=True)
class Classified:
    """The entries of a page that something is to be done about.

    Attributes:
      stale: Location -> the entries whose objects are to be deleted.
      refused: Entries that cannot be settled, and why; they stay until somebody looks.
    """

    stale: dict[str, list[Entry]] = field(default_factory=dict)
    refused: list[tuple[Entry, UploadRefused]] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        """The stale ones of all locations."""
        return [entry for entries in self.stale.values() for entry in entries]


def stale_before(now: datetime, stale_after: timedelta) -> float:
    """The epoch seconds before which an upload must have been prepared to be stale.

    Whole seconds, and exactly as old is not stale (document 100, 処理フロー: stale?; workers.md: strict).
    """
    return int(now.timestamp()) - stale_after.total_seconds()


def classify(page: Mapping[bytes, bytes], first_fresh: float, stores: Mapping[str, ObjectStore]) -> Classified:
    """Sort a page's entries, given the first second that is not stale.

    An entry of a store that is switched off is left alone, whatever it is like.
    """
    judged = Classified()
    for name, value in page.items():
        prepared_at = epoch_seconds(value)
        if prepared_at is not None and prepared_at >= first_fresh:
            continue
        entry = Entry(name, value)
        store = stores.get(entry.location)
        if store is not None and not store.enabled:
            continue
        try:
            entry.refuse_unusable()
            if store is None:
                raise UploadRefused(f"HOUSEKEEPING_OBJECT_STORES has no location {entry.location!r}")
        except UploadRefused as error:
            judged.refused.append((entry, error))
        else:
            judged.stale.setdefault(store.location, []).append(entry)
    return judged


def prepared_at(entry: Entry) -> datetime:
    """When a stale entry's upload was prepared."""
    seconds = epoch_seconds(entry.value)
    assert seconds is not None, "what is stale has a time"
    return datetime.fromtimestamp(seconds, UTC)
