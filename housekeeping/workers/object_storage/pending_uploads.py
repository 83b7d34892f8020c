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

A second look right before the deletion would not keep a completed upload's object: the upload may be completed between
that look and the store's answer. Instead, the sweep claims an entry in the same script that reads it for the last time
(`Claims`). From then on `complete` and `prepare` refuse it. The claim is a key of its own, and the entry does not
change, because other programs read it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from housekeeping import (
    Clock,
    RecordChanged,
    UploadBeingDeleted,
    UploadRefused,
    read_redis_clock,
    read_scripts,
    retry_on_outage,
    run_replicated,
    shared_redis,
    translate_redis_errors,
)

__all__ = ["PendingUpload", "complete", "count", "each", "exists", "pending_only", "prepare"]

#: The hash. Other programs read and write it, so it has no namespace.
KEY = "pending_direct_uploads"  # docs/workers/object_storage.md

#: 9999-12-31 23:59:59, the last second that datetime supports. Larger values may be milliseconds.
_LAST_SECOND: Final = 253_402_300_799
_DIGITS: Final = 12

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


@dataclass(slots=True)
class Entry:
    """Field and value, as stored in Redis.

    Attributes:
      location: The name of the store: the text of the field before its first colon.
      path: The text after the first colon, further colons included.
      seconds: The seconds from 1970 until the upload was prepared; None if the value is not such a number.
    """

    field: bytes
    value: bytes
    location: str = dataclasses.field(init=False, compare=False)
    path: str = dataclasses.field(init=False, compare=False)
    seconds: int | None = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.location, _, self.path = _readable(self.field).partition(":")
        is_number = self.value.isdigit() and len(self.value) <= _DIGITS
        self.seconds = seconds if is_number and (seconds := int(self.value)) <= _LAST_SECOND else None

    @property
    def prepared_at(self) -> datetime:
        """The time at which the upload of a usable entry was prepared."""
        return datetime.fromtimestamp(self.seconds or 0, UTC)

    def refuse_unusable(self) -> None:
        """Check that the path is valid and the value is a time.

        Raises:
          UploadRefused: Otherwise.
        """
        if self.seconds is None:
            raise UploadRefused(f"the value {_readable(self.value)!r} is not a number of whole epoch seconds")
        try:
            self.field.decode()
        except UnicodeDecodeError:
            raise UploadRefused(f"{_readable(self.field)!r} is not UTF-8") from None
        refuse_wrong_path(self.path)


def field_of(location: str, path: str) -> bytes:
    """Return the field of an upload."""
    return f"{location}:{path}".encode(errors="surrogateescape")


def refuse_wrong_path(path: str) -> None:
    """Check that the path can be that of an object below its store's prefix.

    Raises:
      UploadRefused: When it is empty or absolute, leaves the prefix, or is one that some stores read as another path:
        ``a/`` and ``a//b`` mean ``a`` and ``a/b`` to them.
    """
    if not path:
        raise UploadRefused("the path is empty")
    if path.startswith("/"):
        raise UploadRefused(f"the path {path!r} is absolute")
    parts = path.split("/")
    if ".." in parts:
        raise UploadRefused(f"the path {path!r} leaves its store")
    if "" in parts or "." in parts:
        raise UploadRefused(f"the path {path!r} has an empty component or one that is '.'")
    if _CONTROL.search(path):
        raise UploadRefused(f"the path {path!r} contains control characters")
    if _SURROGATE.search(path):
        raise UploadRefused(f"the path {path!r} cannot be encoded as UTF-8")


def _readable(raw: bytes) -> str:
    return raw.decode(errors="backslashreplace")


#: Time to live of a claim whose object may be gone. Each run that tries again renews it.
KEPT: Final = timedelta(days=30)
#: After this time `prepare` may use the path of such a claim again.
BLOCKED_FOR: Final = timedelta(days=1)
_MILLISECOND: Final = timedelta(milliseconds=1)

_LUA: Final = read_scripts(__file__)
_READ: Final = _LUA["read"]
PAGE: Final = 1000  # entries per round trip; larger pages cost the server more time per entry


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
    refuse_wrong_path(path)
    seconds = int(clock.now().timestamp()) if clock else ""
    if not _run("prepare", field_of(location, path), seconds, (KEPT - BLOCKED_FOR) // _MILLISECOND):
        raise UploadBeingDeleted(f"the stale upload '{location}:{path}' is being deleted; use another path")


def complete(location: str, path: str) -> bool:
    """Record that an upload has succeeded, so that its object is kept; return whether it was pending until now.

    False means that the object may be missing: the upload was stale and is deleted or being deleted, was never
    prepared, or was completed before.
    """
    return bool(_run("complete", field_of(location, path)))


def exists(location: str, path: str) -> bool:
    """Return whether the upload is pending."""
    with translate_redis_errors():
        return bool(shared_redis.get().hexists(KEY, field_of(location, path)))


def pending_only(location: str, paths: Iterable[str]) -> list[str]:
    """Return the paths whose upload is pending, in their order; one round trip per thousand."""
    wanted, pending = list(paths), list[str]()
    for start in range(0, len(wanted), PAGE):
        chunk = wanted[start : start + PAGE]
        with translate_redis_errors():
            values: Any = shared_redis.get().hmget(KEY, [field_of(location, path) for path in chunk])
        pending += [path for path, value in zip(chunk, values, strict=True) if value is not None]
    return pending


def count() -> int:
    """Return the number of pending uploads in all locations."""
    with translate_redis_errors():
        number: Any = shared_redis.get().hlen(KEY)
    return int(number)


def each() -> Iterator[PendingUpload]:
    """Iterate over all pending uploads, in no particular order and with bounded memory.

    Note: An upload that stays pending is yielded at least once, and may be yielded twice while the hash is resized.
    """
    for page in pages():
        for entry in page:
            prepared_at = None if entry.seconds is None else entry.prepared_at
            yield PendingUpload(entry.location, entry.path, prepared_at)


def now() -> datetime:
    """Return the time of the Redis server, which is the clock of `prepare`; one round trip."""
    return read_redis_clock().server_at


def page(cursor: int, size: int, before: int | None = None) -> tuple[int, list[Entry]]:
    """Return a page of about `size` entries and the next cursor. 0 starts, and 0 means the end.

    Parameters:
      before: Epoch seconds. The server leaves out entries prepared then or later; usually that is most of them.

    Note: Redis returns a small hash as one page, whatever the size.
    """
    with translate_redis_errors():
        limit = "" if before is None else before
        found: Any = shared_redis.get().eval(_LUA["page_before"], 1, KEY, cursor, size, limit)
    following, words = found
    return int(following), list(map(Entry, words[::2], words[1::2]))


def pages(before: int | None = None) -> Iterator[list[Entry]]:
    """Yield all pending uploads in pages, except those prepared at or after `before`."""
    cursor, found = page(0, PAGE, before)
    yield found
    while cursor:
        cursor, found = page(cursor, PAGE, before)
        yield found


@dataclass(slots=True)
class Ends:
    """What became of claimed entries whose objects were deleted.

    Attributes:
      removed: The entries that were removed.
      lost: Entries that another program completed or prepared again despite the claim, and entries whose claim Redis
        has lost; each with the error.
    """

    removed: list[Entry] = dataclasses.field(default_factory=list)
    lost: list[tuple[Entry, RecordChanged]] = dataclasses.field(default_factory=list)


class Claims:
    """Claims of one run. What it leaves unfinished stays claimed, and a later run takes it over.

    Parameters:
      run_id: The run's id in the ledger.
      active: Returns the ids of the active runs, whose claims are left alone.
    """

    def __init__(self, run_id: int, active: Callable[[], Collection[int]] = tuple) -> None:
        self._run_id = run_id
        self._active = active
        self._ended: set[str] = set()
        self._take: Any = shared_redis.get().register_script(_READ + _LUA["take"])
        self._finish: Any = shared_redis.get().register_script(_READ + _LUA["finish"])

    def take(self, chosen: Sequence[Entry]) -> list[Entry]:
        """Claim the entries that still have the same value and that no other active run has claimed; return them.

        One round trip. If other runs have left claims: a second one, and a query for the active runs.

        Behind Sentinel it returns when a replica has the claims, so that a failover to it keeps them.

        Raises:
          RedisUnavailable: Some entries may be claimed nevertheless.
        """
        indexes, holders = self._claimed(chosen)
        # Only now: a run commits its row before it claims, so every active holder is in the ledger.
        ended = {*map(_readable, holders)} - {*map(str, self._active())} if holders else None
        if ended:
            self._ended |= ended
            indexes, _ = self._claimed(chosen)
        return [chosen[index] for index in indexes]

    def _claimed(self, chosen: Sequence[Entry]) -> Any:
        given = self._given(chosen, ended=[*self._ended])
        with translate_redis_errors():
            return run_replicated(shared_redis.get(), lambda client: self._take(**given, client=client))

    def finish(self, deleted: Sequence[Entry]) -> Ends:
        """Remove the entries whose objects are gone, if unchanged, with their claims; one round trip.

        Raises:
          RedisUnavailable: The objects are gone. A later run finds them missing and removes their entries.
        """
        if not deleted:
            return Ends()
        again = False

        def finish() -> Any:
            nonlocal again
            given = self._given(deleted, again=again)
            again = True
            return self._finish(**given)

        ends = Ends()
        for entry, code in zip(deleted, retry_on_outage(finish), strict=True):
            if code == _REMOVED:
                ends.removed.append(entry)
            elif code in _LOST:
                ends.lost.append((entry, RecordChanged(_LOST[code])))
        return ends

    def _given(self, entries: Sequence[Entry], **more: object) -> dict[str, Any]:
        prefix = _claim(b"")
        given = {"run": str(self._run_id), "ttl": KEPT // _MILLISECOND, "begin": len(prefix) + 1, **more}
        keys = [KEY, *(prefix + entry.field for entry in entries)]
        return {"keys": keys, "args": [json.dumps(given), *(entry.value for entry in entries)]}


_REMOVED: Final = 1
_LOST: Final = {
    2: "completed by another program while its object was deleted",
    3: "prepared again by another program while its object was deleted",
    5: "Redis lost its claim; its object was deleted",
}


def _claim(field: bytes) -> bytes:
    return f"{shared_redis.namespace}:upload_claim:".encode() + field


def _run(name: str, field: bytes, *arguments: str | int) -> Any:
    with translate_redis_errors():
        return run_replicated(
            shared_redis.get(), lambda client: client.eval(_LUA[name], 2, KEY, _claim(field), field, *arguments)
        )
