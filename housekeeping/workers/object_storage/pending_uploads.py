"""What an application calls that uploads to an object store directly.

::

    from housekeeping.workers.object_storage import pending_uploads

    pending_uploads.prepare("artifacts", path)      # before the client is given leave to upload
    ...
    if not pending_uploads.complete("artifacts", path):
        ...                                         # too late: the object is gone, or about to be

What was prepared and is not completed within 3 hours is deleted, object and entry, by the worker. All programs that
use this must have the same ``HOUSEKEEPING_REDIS_URL`` and ``HOUSEKEEPING_NAMESPACE``. Every function raises
`RedisUnavailable` when Redis does not answer.

Note: A program that writes the hash itself asks nobody: while the worker is deleting the object, its ``HDEL`` is not
refused as `complete` is. An answer of 0 tells it that the entry was gone before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final

from housekeeping.sweeps import Clock, shared_redis, translate_redis_errors
from housekeeping.workers.object_storage import claims, pending_entry
from housekeeping.workers.object_storage.pending_entry import Entry, PendingUpload, field_of

__all__ = ["PendingUpload", "complete", "count", "each", "exists", "pending_only", "prepare"]

_PAGE: Final = 1000  # entries a round trip

#: KEYS: the hash. ARGV: cursor, size, epoch seconds. What is no time is kept, for whoever judges it.
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
    """Note that an upload begins now; once more for the same path begins it anew.

    Parameters:
      clock: Decides when it began; the clock of Redis unless given, so that no application server's clock matters.

    Raises:
      UploadRefused: When the path is empty or absolute or climbs out, or the location holds a colon.
      UploadBeingDeleted: When an earlier upload to this path is just being deleted as stale; take another path.
    """
    pending_entry.refuse_wrong_location(location)
    pending_entry.refuse_wrong_path(path)
    claims.prepare(field_of(location, path), int(clock.now().timestamp()) if clock else None)


def complete(location: str, path: str) -> bool:
    """Note that an upload has ended well, so that its object stays; whether it was pending until now.

    False means that the object must not be relied on: the upload was stale and is deleted or being deleted,
    was never prepared, or was completed before.
    """
    return claims.complete(field_of(location, path))


def exists(location: str, path: str) -> bool:
    """Whether the upload is pending."""
    with translate_redis_errors():
        return bool(shared_redis.get().hexists(pending_entry.KEY, field_of(location, path)))


def pending_only(location: str, paths: Iterable[str]) -> list[str]:
    """Those of the paths whose upload is pending, in their order; one round trip for a thousand."""
    asked, pending = list(paths), list[str]()
    for start in range(0, len(asked), _PAGE):
        some = asked[start : start + _PAGE]
        with translate_redis_errors():
            values: Any = shared_redis.get().hmget(pending_entry.KEY, [field_of(location, path) for path in some])
        pending += [path for path, value in zip(some, values, strict=True) if value is not None]
    return pending


def count() -> int:
    """How many uploads are pending, in all locations."""
    with translate_redis_errors():
        number: Any = shared_redis.get().hlen(pending_entry.KEY)
    return int(number)


def each() -> Iterator[PendingUpload]:
    """All pending uploads, in no order, never all of them in memory.

    Note: One that is pending all the while is yielded at least once; twice, perhaps, while the hash grows or shrinks.
    """
    for page in pages(_PAGE):
        for field, value in page.items():
            yield Entry(field, value).as_upload()


def page(cursor: int, size: int, before: float = math.inf) -> tuple[int, dict[bytes, bytes]]:
    """The entries of a page of about `size`, field -> value, and the cursor of the next; 0 begins, and 0 is the end.

    Parameters:
      before: Epoch seconds; what was prepared then or later is left out, in Redis: mostly that is nearly all of it.

    Note: Redis takes a small hash as one page, whatever the size.
    """
    limit = "inf" if before == math.inf else f"{before:.6f}"
    with translate_redis_errors():
        found: Any = shared_redis.get().eval(_PAGE_BEFORE, 1, pending_entry.KEY, cursor, size, limit)
    following, words = found
    return int(following), dict(zip(words[::2], words[1::2], strict=True))


def pages(size: int, before: float = math.inf) -> Iterator[dict[bytes, bytes]]:
    """The whole hash, page by page, less what was prepared at or after `before`."""
    cursor, found = page(0, size, before)
    yield found
    while cursor:
        cursor, found = page(cursor, size, before)
        yield found
