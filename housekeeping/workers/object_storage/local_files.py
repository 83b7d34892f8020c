"""Deleting a file of a local store without leaving its folder by a symbolic link."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from housekeeping.sweeps import ObjectNotDeleted

#: A folder to go on from. Linux needs no right to read it then; a symbolic link is not followed.
_FOLDER: Final = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)


def delete_file(root: str, key: str) -> None:
    """Delete the file with this path below the root; if it is a symbolic link, the link and not its target.

    A symbolic link to a folder is followed where that folder is below the root. The folder is opened part by part
    and no link is followed then, so a link that is put there meanwhile is refused.

    Raises:
      ObjectNotDeleted: When a link leads out of the root; nothing is deleted.
      FileNotFoundError: When there is no such file, or no root.
      OSError: When the file cannot be deleted.

    Note: It does not notice a folder that is moved out of the root while the file is deleted; the file goes there.
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
    """Return a descriptor of the folder below the root, opened part by part without following symbolic links.

    Raises:
      OSError: When a part is missing, or no folder.
    """
    descriptor = os.open(root, _FOLDER)
    for part in parts:
        try:
            following = os.open(part, _FOLDER, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = following
    return descriptor
