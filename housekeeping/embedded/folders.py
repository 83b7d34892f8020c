"""Temporary folder of one run: created, locked while in use, and found again after its owner was killed."""

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
#: Only a folder with this file is ever removed together with its contents.
_MARKER: Final = "embedded-servers-of-housekeeping"
_LONGEST: Final = 103  # bytes of a unix socket's path; 103 on macOS, 107 on Linux
_BELOW: Final = len(f"/{_PREFIX}12345678/s/.s.PGSQL.5432")  # bytes; the longest socket path in a folder
_REMOVE_TRIES: Final = 20
_REMOVE_PAUSE: Final = 0.05  # seconds


@dataclass(frozen=True, slots=True)
class Folder:
    """Folder that this process has locked; the lock ends with the process."""

    path: Path
    lock: int

    def release(self) -> None:
        """Release the lock and keep the folder."""
        os.close(self.lock)

    def remove(self) -> None:
        """Remove the folder with its contents; no process may be running in it.

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
                # The last child of a killed server may still write a file before it ends.
                time.sleep(_REMOVE_PAUSE)
            else:
                break
        os.close(self.lock)


def create(parents: Iterable[Path], account: Account | None) -> Folder:
    """Create a locked folder in the first suitable one of `parents`.

    Raises:
      EmbeddedServerError: When no parent is both short enough for a unix socket and open to `account`.
    """
    rejected: list[str] = []
    for parent in parents:
        reason = _unfit(parent, account)
        if reason is None:
            return _create_in(parent, account)
        rejected.append(f"{parent} {reason}")
    raise EmbeddedServerError(f"no temporary folder fits: {'; '.join(rejected)}; set TMPDIR to a short, open one")


def _unfit(parent: Path, account: Account | None) -> str | None:
    if len(os.fsencode(parent)) + _BELOW > _LONGEST:
        return "is too long for a unix socket"
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        return "is not a folder one can write to"
    if account is not None and not account.may_enter(parent):
        return f"is closed to '{account.name}'"
    return None


def _create_in(parent: Path, account: Account | None) -> Folder:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # None if another process has found the folder while it was still empty, and removed it as a leftover.
        lock = _lock(path)
        if lock is not None:
            break
    (path / _MARKER).write_text("Made by housekeeping.embedded; removed when no process holds a lock on the folder.\n")
    if account is not None:
        # The servers' account may pass through but not list; the servers' own folders below are closed to all others.
        path.chmod(0o711)
    return Folder(path, lock)


def create_inside(folder: Path, account: Account | None) -> Path:
    """Create `folder`, accessible only to `account`, or only to this user if None."""
    folder.mkdir(mode=0o700)
    if account is not None:
        os.chown(folder, account.uid, account.gid)
    return folder


def abandoned(parents: Iterable[Path]) -> Iterator[Folder]:
    """Find and lock the folders whose owner was killed.

    Folders of other users, links, and folders that merely look alike are ignored. An empty folder, left by a process
    that was killed right after creating it, is removed.
    """
    for parent in parents:
        for path in _candidates(parent):
            lock = _lock(path)
            if lock is None:
                continue
            if _MARKER in os.listdir(lock):
                yield Folder(path, lock)
                continue
            if not os.listdir(lock):
                os.rmdir(path)
            os.close(lock)


def _candidates(parent: Path) -> list[Path]:
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
    # The folder itself is locked and not a file in it. Otherwise there would be a moment in which the folder exists
    # without a lock, and a folder being created could be removed as a leftover.
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed and recreated the folder between the open and the lock.
        owned = status.st_uid == os.geteuid() and os.path.samestat(status, os.lstat(path))
    except OSError:
        owned = False
    if not owned:
        os.close(lock)
        return None
    return lock
