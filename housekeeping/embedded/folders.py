"""The temporary folder of one run: made, locked while in use, and known again when its owner was killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from housekeeping.core.errors import EmbeddedServerError
from housekeeping.embedded.processes import Account

_PREFIX: Final = "housekeeping-"
_NAME: Final = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
#: Only a folder with this file in it is ever removed with what it holds.
_MARKER: Final = "embedded-servers-of-housekeeping"
_LONGEST: Final = 103  # bytes of a unix socket's path; 103 on macOS, 107 on Linux
_BELOW: Final = len(f"/{_PREFIX}12345678/s/.s.PGSQL.5432")  # bytes; the longest socket path in a folder
_REMOVE_TRIES: Final = 20
_REMOVE_PAUSE: Final = 0.05  # seconds


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder whose lock this process holds; the lock ends with the process, whatever ends that."""

    path: Path
    lock: int

    def give_up(self) -> None:
        """Let go of the lock and leave the folder as it is."""
        os.close(self.lock)

    def remove(self) -> None:
        """Remove the folder and all it holds; nothing in it may be running any more.

        Raises:
          OSError: When something could not be removed; the folder stays locked.
        """
        for left in reversed(range(_REMOVE_TRIES)):
            try:
                shutil.rmtree(self.path)
            except FileNotFoundError:
                if not self.path.exists():
                    break
            except OSError:
                if not left:
                    raise
                # The last of a killed server's children may still write a file on its way out.
                time.sleep(_REMOVE_PAUSE)
            else:
                break
        os.close(self.lock)


def make(parents: Iterable[Path], account: Account | None) -> Folder:
    """Make a locked folder in the first of `parents` that will do.

    Raises:
      EmbeddedServerError: When no parent is both short enough for a unix socket and open to `account`.
    """
    refused: list[str] = []
    for parent in parents:
        reason = _unfit(parent, account)
        if reason is None:
            return _make_in(parent, account)
        refused.append(f"{parent} {reason}")
    raise EmbeddedServerError(f"no temporary folder fits: {'; '.join(refused)}; set TMPDIR to a short, open one")


def _unfit(parent: Path, account: Account | None) -> str | None:
    if len(os.fsencode(parent)) + _BELOW > _LONGEST:
        return "is too long for a unix socket"
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        return "is not a folder one can write to"
    if account is not None and not account.may_enter(parent):
        return f"is closed to '{account.name}'"
    return None


def _make_in(parent: Path, account: Account | None) -> Folder:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # None when a neighbour's search took the still empty folder for a leftover, and removed it.
        lock = _lock(path)
        if lock is not None:
            break
    (path / _MARKER).write_text("Made by housekeeping.embedded; cleared when nobody holds a lock on the folder.\n")
    if account is not None:
        # Through, but no look: what the servers own is further down, and closed to all but them.
        path.chmod(0o711)
    return Folder(path, lock)


def make_inside(folder: Path, account: Account | None) -> Path:
    """Make `folder`, open to `account` (None: to oneself) alone."""
    folder.mkdir(mode=0o700)
    if account is not None:
        os.chown(folder, account.uid, account.gid)
    return folder


def abandoned(parents: Iterable[Path]) -> Iterator[Folder]:
    """Our folders whose owner was killed, locked against others who look for them.

    Folders of other users, links, and folders that merely look like ours are passed over; an empty
    one, left by somebody killed right after making it, is removed in passing.
    """
    for parent in parents:
        for path in _named_like_ours(parent):
            lock = _lock(path)
            if lock is None:
                continue
            if _MARKER in os.listdir(lock):
                yield Folder(path, lock)
                continue
            if not os.listdir(lock):
                os.rmdir(path)
            os.close(lock)


def _named_like_ours(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [
                parent / entry.name
                for entry in entries
                if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _lock(path: Path) -> int | None:
    # The folder itself is locked, not a file in it: there is no moment in which it exists and
    # cannot be locked yet, so no half-made folder can be taken for an abandoned one.
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Removed (and perhaps made anew) by another between opening and locking it?
        ours = status.st_uid == os.geteuid() and os.path.samestat(status, os.lstat(path))
    except OSError:
        ours = False
    if not ours:
        os.close(lock)
        return None
    return lock
