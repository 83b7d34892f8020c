"""Entry of the Redis hash of pending uploads: field ``<location>:<path>``, value the time it was prepared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from housekeeping.sweeps import UploadRefused

#: The hash. Other programs read and write it, so it has no namespace.
KEY = "pending_direct_uploads"  # docs/workers/object_storage.md

#: 9999-12-31 23:59:59, the last second that datetime supports. Larger values may be milliseconds.
_LAST_SECOND: Final = 253_402_300_799
_DIGITS: Final = 12

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Entry:
    """Field and value, as stored in Redis."""

    field: bytes
    value: bytes

    @property
    def location(self) -> str:
        """The name of the store: the text before the first colon."""
        return _readable(self.field.partition(b":")[0])

    @property
    def path(self) -> str:
        """The text after the first colon, further colons included."""
        return _readable(self.field.partition(b":")[2])

    @property
    def seconds(self) -> int | None:
        """The seconds from 1970 until the upload was prepared; None if the value is not such a number."""
        if not self.value.isdigit() or len(self.value) > _DIGITS:
            return None
        seconds = int(self.value)
        return seconds if seconds <= _LAST_SECOND else None

    def usable_path(self) -> str:
        """Return the path after checking that it is valid and the value is a time.

        Raises:
          UploadRefused: Otherwise.
        """
        if self.seconds is None:
            raise UploadRefused(f"the value {_readable(self.value)!r} is not a number of whole epoch seconds")
        try:
            path = self.field.decode().partition(":")[2]
        except UnicodeDecodeError:
            raise UploadRefused(f"{_readable(self.field)!r} is not UTF-8") from None
        refuse_wrong_path(path)
        return path


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
