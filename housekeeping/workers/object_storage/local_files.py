"""Deletion of a local store's file that never follows a symbolic link out of the store's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from housekeeping.sweeps import ObjectNotDeleted

#: Open a folder for `openat`. On Linux this needs no permission to read it; a symbolic link is not followed.
_FOLDER: Final = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)


def delete_file(root: str, key: str) -> None:
    """Delete the file with this path below the root. A symbolic link is deleted itself, not its target.

    A symbolic link to a folder is followed only if that folder is below the root. The folder is then opened component
    by component without following links, so a link that is created meanwhile is refused.

    Raises:
      ObjectNotDeleted: When a link leads out of the root; nothing is deleted.
      FileNotFoundError: When the file or the root does not exist.
      OSError: When the file cannot be deleted.

    Note: If the folder is moved out of the root during the call, the file is deleted there.
    """
    folder, name = os.path.split(key)
    real_root = os.path.realpath(root)
    below = os.path.relpath(os.path.realpath(os.path.join(root, folder)), real_root)
    parts = [] if below == os.curdir else below.split(os.sep)
    if os.pardir in parts:
        raise ObjectNotDeleted(f"a symbolic link leads the path {key!r} out of the store's folder")
    descriptor = opened(real_root, parts)
    try:
        os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def opened(root: str, parts: Sequence[str]) -> int:
    """Return a descriptor of the folder below the root, without following symbolic links.

    Raises:
      OSError: When a component is missing or not a folder.
    """
    descriptor = os.open(root, _FOLDER)
    for part in parts:
        try:
            following = os.open(part, _FOLDER, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = following
    return descriptor
