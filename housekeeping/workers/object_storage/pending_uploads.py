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

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

from housekeeping.sweeps import Clock, shared_redis, translate_redis_errors
from housekeeping.workers.object_storage import claims, pending_entry
from housekeeping.workers.object_storage.pending_entry import Entry, PendingUpload, field_of

__all__ = ["PendingUpload", "complete", "count", "each", "exists", "pending_only", "prepare"]

_PAGE: Final = 1000  # entries per round trip

#: KEYS: the hash. ARGV: cursor, size, epoch seconds. Values that are not times are returned, to be reported.
_PAGE_BEFORE: Final = """
local found = redis.call("hscan", KEYS[1], ARGV[1], "count", ARGV[2])
local before = ARGV[3] == "inf" and math.huge or tonumber(ARGV[3])
local kept = {}
for n = 1, #found[2], 2 do
  local value = found[2][n + 1]
  if #value > 12 or not string.find(value, "^%d+$") or tonumber(value) < before then
    kept[#kept + 1] = found[2][n]
    kept[#kept + 1] = value
  end
end
return {found[1], kept}
"""


def prepare(location: str, path: str, *, clock: Clock | None = None) -> None:
    """Record that an upload begins now. A second call for the same path restarts its time.

    Parameters:
      clock: Source of the start time; the Redis server's clock unless given, so that clocks of application servers do
        not matter.
    Raises:
      UploadRefused: When the path is empty, absolute or leaves its store, or the location contains a colon.
      UploadBeingDeleted: When an earlier upload to this path is being deleted as stale. Use another path.
    """
    pending_entry.refuse_wrong_location(location)
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
    for start in range(0, len(wanted), _PAGE):
        chunk = wanted[start : start + _PAGE]
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
    for page in pages(_PAGE):
        for field, value in page.items():
            yield Entry(field, value).as_upload()


def page(cursor: int, size: int, before: float = math.inf) -> tuple[int, dict[bytes, bytes]]:
    """Return a page of about `size` entries, field -> value, and the next cursor. 0 starts, and 0 means the end.

    Parameters:
      before: Epoch seconds. Entries prepared then or later are left out by the server; usually that is most of them.

    Note: Redis returns a small hash as one page, whatever the size.
    """
    limit = "inf" if before == math.inf else f"{before:.6f}"
    with translate_redis_errors():
        found: Any = shared_redis.get().eval(_PAGE_BEFORE, 1, pending_entry.KEY, cursor, size, limit)
    following, words = found
    return int(following), dict(zip(words[::2], words[1::2], strict=True))


def pages(size: int, before: float = math.inf) -> Iterator[dict[bytes, bytes]]:
    """Iterate over the whole hash by pages, without entries prepared at or after `before`."""
    cursor, found = page(0, size, before)
    yield found
    while cursor:
        cursor, found = page(cursor, size, before)
        yield found
