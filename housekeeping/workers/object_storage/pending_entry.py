"""One entry of the hash of pending uploads: field ``<location>:<path>``, value the time it was prepared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from housekeeping.sweeps import UploadRefused

#: The hash itself. Programs of others read and write it too, so it has no namespace.
KEY = "pending_direct_uploads"  # workers.md, 100

#: The last second datetime knows, 9999-12-31 23:59:59: later ones are no times, milliseconds perhaps.
_LAST_SECOND: Final = 253_402_300_799
_DIGITS: Final = 12

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An upload that was prepared and not completed.

    Attributes:
      prepared_at: UTC; null when what stands there is no time.
    """

    location: str
    path: str
    prepared_at: datetime | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A field and its value, as they are in Redis."""

    field: bytes
    value: bytes

    @property
    def location(self) -> str:
        """The name of the store: what stands before the first colon."""
        return _readable(self.field.partition(b":")[0])

    @property
    def path(self) -> str:
        """What stands after the first colon, other colons included."""
        return _readable(self.field.partition(b":")[2])

    def as_upload(self) -> PendingUpload:
        """The entry in words; what cannot be decoded is shown with its bytes escaped."""
        seconds = epoch_seconds(self.value)
        prepared_at = None if seconds is None else datetime.fromtimestamp(seconds, UTC)
        return PendingUpload(self.location, self.path, prepared_at)

    def refuse_unusable(self) -> None:
        """Return when the entry's path can be an object's and its value is a time.

        Raises:
          UploadRefused: When not.
        """
        if epoch_seconds(self.value) is None:
            raise UploadRefused(f"prepared at {_readable(self.value)!r}, which is no number of whole epoch seconds")
        try:
            self.field.decode()
        except UnicodeDecodeError:
            raise UploadRefused(f"{_readable(self.field)!r} is not UTF-8") from None
        refuse_wrong_path(self.path)


def field_of(location: str, path: str) -> bytes:
    """The field of an upload."""
    return f"{location}:{path}".encode(errors="surrogateescape")


def epoch_seconds(value: bytes) -> int | None:
    """The whole seconds since 1970 that stand there; None when it is no such number."""
    if not value.isdigit() or len(value) > _DIGITS:
        return None
    seconds = int(value)
    return seconds if seconds <= _LAST_SECOND else None


def refuse_wrong_path(path: str) -> None:
    """Return when the path can be an object's below its store's prefix.

    Raises:
      UploadRefused: When it is empty or absolute, climbs out, or is one that stores take for another:
        ``a/`` and ``a//b`` mean ``a`` and ``a/b`` to some.
    """
    if not path:
        raise UploadRefused("the path is empty")
    if path.startswith("/"):
        raise UploadRefused(f"the path {path!r} is absolute")
    parts = path.split("/")
    if ".." in parts:
        raise UploadRefused(f"the path {path!r} climbs out of its store")
    if "" in parts or "." in parts:
        raise UploadRefused(f"the path {path!r} has an empty part or one that is '.'")
    if _CONTROL.search(path):
        raise UploadRefused(f"the path {path!r} holds control characters")
    if _SURROGATE.search(path):
        raise UploadRefused(f"the path {path!r} cannot be written as UTF-8")


def refuse_wrong_location(location: str) -> None:
    """Return when this can be a location's name.

    Raises:
      UploadRefused: When it is empty or holds a colon, which ends it.
    """
    if not location or ":" in location:
        raise UploadRefused(f"the location {location!r} is empty or holds a colon")


def _readable(raw: bytes) -> str:
    return raw.decode(errors="backslashreplace")
