"""Functions for applications whose clients upload to an object store directly.

::

    from housekeeping.workers.object_storage import pending_uploads

    pending_uploads.prepare("artifacts", path)      # before the client may upload
    ...
    if not pending_uploads.complete("artifacts", path):
        ...                                         # too late: the object is deleted or being deleted

The worker deletes uploads that are not completed within 3 hours, both object and entry. All programs that use this
module need the same ``HOUSEKEEPING_REDIS_URL`` and ``HOUSEKEEPING_NAMESPACE``. Every function raises
`RedisUnavailable` when Redis does not answer.

Note: A program that writes the hash itself bypasses the claims. Unlike `complete`, its ``HDEL`` succeeds while the
worker is deleting the object. An answer of 0 tells it that the entry was already gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from housekeeping.sweeps import Clock, UploadRefused, shared_redis, translate_redis_errors
from housekeeping.workers.object_storage import claims, pending_entry
from housekeeping.workers.object_storage.pending_entry import Entry, field_of

__all__ = ["PendingUpload", "complete", "count", "each", "exists", "pending_only", "prepare"]

PAGE: Final = 1000  # entries per round trip; larger pages cost the server more time per entry

#: KEYS: the hash. ARGV: cursor, size, epoch seconds. Leaves out what was prepared then or later. Values with another
#: number of digits are returned, because they may not be times.
_PAGE_BEFORE: Final = """
local found, before, kept = redis.call("hscan", KEYS[1], ARGV[1], "count", ARGV[2]), ARGV[3], {}
local words, digits, find = found[2], #before, string.find
for n = 2, #words, 2 do
  local value = words[n]
  if #value ~= digits or value < before or find(value, "%D") then
    kept[#kept + 1] = words[n - 1]
    kept[#kept + 1] = value
  end
end
return {found[1], kept}
"""


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """Upload that was prepared and not completed.

    Attributes:
      prepared_at: UTC; None when the value is not a time.
    """

    location: str
    path: str
    prepared_at: datetime | None


def prepare(location: str, path: str, *, clock: Clock | None = None) -> None:
    """Record that an upload begins now. A second call for the same path restarts its time.

    Parameters:
      clock: Source of the start time; the Redis server's clock unless given, so that clocks of application servers do
        not matter.

    Raises:
      UploadRefused: When the path is empty, absolute or leaves its store, or the location contains a colon.
      UploadBeingDeleted: When an earlier upload to this path is being deleted as stale. Use another path.
    """
    if not location or ":" in location:
        raise UploadRefused(f"the location {location!r} is empty or contains a colon")
    pending_entry.refuse_wrong_path(path)
    claims.prepare(field_of(location, path), int(clock.now().timestamp()) if clock else None)


def complete(location: str, path: str) -> bool:
    """Record that an upload has succeeded, so that its object is kept; return whether it was pending until now.

    False means that the object may be missing: the upload was stale and is deleted or being deleted, was never
    prepared, or was completed before.
    """
    return claims.complete(field_of(location, path))


def exists(location: str, path: str) -> bool:
    """Return whether the upload is pending."""
    with translate_redis_errors():
        return bool(shared_redis.get().hexists(pending_entry.KEY, field_of(location, path)))


def pending_only(location: str, paths: Iterable[str]) -> list[str]:
    """Return the paths whose upload is pending, in their order; one round trip per thousand."""
    wanted, pending = list(paths), list[str]()
    for start in range(0, len(wanted), PAGE):
        chunk = wanted[start : start + PAGE]
        with translate_redis_errors():
            values: Any = shared_redis.get().hmget(pending_entry.KEY, [field_of(location, path) for path in chunk])
        pending += [path for path, value in zip(chunk, values, strict=True) if value is not None]
    return pending


def count() -> int:
    """Return the number of pending uploads in all locations."""
    with translate_redis_errors():
        number: Any = shared_redis.get().hlen(pending_entry.KEY)
    return int(number)


def each() -> Iterator[PendingUpload]:
    """Iterate over all pending uploads, in no particular order and with bounded memory.

    Note: An upload that stays pending is yielded at least once, and may be yielded twice while the hash is resized.
    """
    for page in pages():
        for entry in page:
            prepared_at = None if entry.seconds is None else datetime.fromtimestamp(entry.seconds, UTC)
            yield PendingUpload(entry.location, entry.path, prepared_at)


def page(cursor: int, size: int, before: int | None = None) -> tuple[int, list[Entry]]:
    """Return a page of about `size` entries and the next cursor. 0 starts, and 0 means the end.

    Parameters:
      before: Epoch seconds. The server leaves out entries prepared then or later; usually that is most of them.

    Note: Redis returns a small hash as one page, whatever the size.
    """
    with translate_redis_errors():
        found: Any = shared_redis.get().eval(
            _PAGE_BEFORE, 1, pending_entry.KEY, cursor, size, "" if before is None else before
        )
    following, words = found
    return int(following), list(map(Entry, words[::2], words[1::2]))


def pages(before: int | None = None) -> Iterator[list[Entry]]:
    """Yield all pending uploads in pages, except those prepared at or after `before`."""
    cursor, found = page(0, PAGE, before)
    yield found
    while cursor:
        cursor, found = page(cursor, PAGE, before)
        yield found
