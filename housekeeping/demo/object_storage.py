"""Sample uploads: stale ones with and without an object, active ones, and some that cannot be deleted."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, Final

from housekeeping.core.redis.client import shared_redis
from housekeeping.workers.object_storage import pending_entry, pending_uploads

TITLE: Final = "DIRECT UPLOADS"

STALE: Final = 2_000
NEVER_CAME: Final = 500  # prepared, but the client never uploaded
GOING_ON: Final = 400
UNKNOWN: Final = 3  # of a store that is not configured: they stay and count as failed

_LOCATION: Final = "artifacts"
_HOUR: Final = 3600
_FOLDERS: Final = 256  # as many as two hexadecimal digits

_folder = Path()


def seed(folder: Path) -> str:
    """Fill a store and the hash in about a second; return a summary line."""
    global _folder
    _folder = _store(folder)
    for number in range(_FOLDERS):
        (_folder / f"{number:02x}").mkdir(parents=True)
    now = int(time.time())
    made: dict[str, int] = {}
    for number in range(STALE + NEVER_CAME + GOING_ON):
        path = _path(number)
        # Stale uploads are spread over the two days before 3 h ago. The others began in the last hour.
        age = 3 * _HOUR + 30 * (number + 1) if number < STALE + NEVER_CAME else number % _HOUR
        made[f"{_LOCATION}:{path}"] = now - age
        if not STALE <= number < STALE + NEVER_CAME:
            os.close(os.open(_folder / path, os.O_CREAT))
    made |= {f"packages:{_path(number)}": now - 9 * _HOUR for number in range(UNKNOWN)}
    client: Any = shared_redis.get()
    client.hset(pending_entry.KEY, mapping=made)
    return (
        f"{len(made):,} pending uploads: {STALE:,} stale, {NEVER_CAME:,} stale without an object, "
        f"{GOING_ON} active, {UNKNOWN} of a store that is not configured"
    )


def settings(folder: Path) -> dict[str, str]:
    """Return one store in a local folder."""
    return {"OBJECT_STORES": json.dumps({_LOCATION: f"file://{_store(folder)}"})}


def counted() -> dict[str, int]:
    """Return the number of entries and objects of each kind."""
    counts = {"stale": 0, "active": 0, "of an unknown store": 0}
    stale_before = time.time() - 3 * _HOUR
    for upload in pending_uploads.each():
        if upload.location != _LOCATION:
            counts["of an unknown store"] += 1
        elif upload.prepared_at is not None and upload.prepared_at.timestamp() < stale_before:
            counts["stale"] += 1
        else:
            counts["active"] += 1
    return counts | {"objects in the store": sum(len(files) for _, _, files in os.walk(_folder))}


def _store(folder: Path) -> Path:
    return folder / "objects"


def _path(number: int) -> str:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return f"{digest[:2]}/{digest[2:18]}"
