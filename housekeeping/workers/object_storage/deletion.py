"""Deletion of many objects of one store; an object that is refused does not affect the others."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, Final

from housekeeping.sweeps import ObjectNotDeleted, ObjectStoreUnavailable
from housekeeping.sweeps import logger as named_logger
from housekeeping.workers.object_storage.stores import BULK, LOCAL, ObjectStore

logger = named_logger(__name__)

#: Concurrent requests where each request deletes one object.
_AT_ONCE: Final = 32
#: Single requests after a bulk request was throttled. If these are as well, so would be the rest.
_PROBES: Final = 4
#: How obstore names the answers of a store that has too much to do.
_THROTTLED: Final = re.compile(r"status code: (429|503)\b")
#: Groups of local files between two checks: this many times `_AT_ONCE` files are deleted in milliseconds.
_LOCAL_PARTS: Final = 8
#: After this many refusals without a deletion, the store itself refuses; most likely a permission is missing.
_REFUSES_ALL: Final = 100
#: Open a folder for `openat`. On Linux this needs no permission to read it; a symbolic link is not followed.
_FOLDER: Final = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)

#: The error of each object, by key; None where it was deleted.
Answers = dict[str, BaseException | None]


@dataclass(slots=True)
class Deleted:
    """Results of a deletion. An object in neither attribute was not tried, or its state is unknown.

    Attributes:
      gone: Paths whose object no longer exists, or never did.
      refused: Path -> the reason why its object may still exist.
    """

    gone: list[str] = field(default_factory=list)
    refused: dict[str, ObjectNotDeleted] = field(default_factory=dict)


class Deletion:
    """Deletions of one run in one store.

    Attributes:
      unavailable: The reason why the rest of the run ignores the store, or None while it works.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.unavailable: ObjectStoreUnavailable | None = None
        self._any_deleted = False
        self._refusals = 0
        self._is_throttled = False
        self._is_available()

    def delete(self, paths: Sequence[str], time_is_up: Callable[[], bool], check: Callable[[], None]) -> Deleted:
        """Delete the objects: in bulk if the store can, otherwise or if that fails one by one.

        Never raises because of the store: failures are in the result or in `unavailable`.

        Parameters:
          time_is_up: Called between requests; True leaves the rest.
          check: Called before each request, or before several hundred local files. What it raises ends the deletion.
        """
        try:
            if self._in_bulk(paths, check):
                return Deleted(list(paths))
        except ObjectStoreUnavailable as error:
            self._mark_unavailable(error)
            return Deleted()
        found = Deleted()
        between_checks = _LOCAL_PARTS if self.store.scheme in LOCAL else 1
        probes = paths[:_PROBES] if self._is_throttled else []
        parts = chain([probes] if probes else [], _parts(paths[len(probes) :], _AT_ONCE))
        for number, some in enumerate(parts):
            if number % between_checks == 0:
                check()
            self._each(some, found)
            if self.unavailable is not None or (some[-1] != paths[-1] and time_is_up()):
                break
        return found

    def _in_bulk(self, paths: Sequence[str], check: Callable[[], None]) -> bool:
        """Delete all in bulk; return False if some may be left or the store has no such request."""
        size = BULK.get(self.store.scheme)
        if size is None or len(paths) == 1:
            return False
        import obstore

        client = self.store.client()
        for some in _parts(paths, size):
            check()
            try:
                obstore.delete(client, [self.store.prefix + path for path in some])
            except Exception as error:
                # One error for all objects, which names one of them: only requests for each show which are left.
                self.store.check_access()
                self._is_throttled = _is_throttled(error)
                return False
        self._any_deleted = True
        return True

    def _each(self, paths: Sequence[str], found: Deleted) -> None:
        try:
            answers = self._answers([self.store.prefix + path for path in paths])
        except ObjectStoreUnavailable as error:
            self._mark_unavailable(error)
            return
        if any(answer is not None for answer in answers.values()) and not self._is_available():
            return
        if len(answers) >= _PROBES and all(map(_is_throttled, answers.values())):
            self._mark_unavailable(self.store.unavailable(answers[self.store.prefix + paths[0]]))
            return
        for path in paths:
            answer = answers[self.store.prefix + path]
            # The store answers, so an object that it does not find is gone.
            if answer is None or _is_missing(answer):
                found.gone.append(path)
                self._any_deleted = self._any_deleted or answer is None
            else:
                found.refused[path] = ObjectNotDeleted(self.store.describe_error(answer))
                self._refusals += 1
        if self._refusals >= _REFUSES_ALL and not self._any_deleted:
            last = next(reversed(found.refused.values()))
            self._mark_unavailable(self.store.unavailable(f"refuses every deletion: {last}"))

    def _answers(self, keys: Sequence[str]) -> Answers:
        client = self.store.client()
        if self.store.scheme == "file":
            # The client would follow a symbolic link out of the folder.
            return delete_files(self.store.place, keys)
        import obstore

        if self.store.scheme in LOCAL:
            return {key: _error_of(obstore.delete, client, key) for key in keys}

        async def at_once() -> list[BaseException | None]:
            return await asyncio.gather(*(obstore.delete_async(client, key) for key in keys), return_exceptions=True)

        return dict(zip(keys, asyncio.run(at_once()), strict=True))

    def _is_available(self) -> bool:
        try:
            self.store.check_access()
        except ObjectStoreUnavailable as error:
            self._mark_unavailable(error)
        return self.unavailable is None

    def _mark_unavailable(self, error: ObjectStoreUnavailable) -> None:
        self.unavailable = error
        logger.error("Object store unavailable; ignored for this run", location=self.store.location, error=str(error))


def delete_files(root: str, keys: Sequence[str]) -> Answers:
    """Delete the files with these paths below the root. A symbolic link is deleted itself, not its target.

    A symbolic link to a folder is followed only if that folder is below the root. The folder is opened component by
    component without following links, so a link that is created meanwhile is refused.

    Returns:
      An error for each file that was not deleted, such as FileNotFoundError, or ObjectNotDeleted when a link leads out
      of the root.

    Note: If the folder is moved out of the root during the call, the file is deleted there.
    """
    try:
        top = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    except OSError as error:
        return dict.fromkeys(keys, error)
    answers: Answers = {}
    try:
        for folder, some in groupby(sorted(keys), key=os.path.dirname):
            answers |= _delete_in_folder(root, top, folder, list(some))
    finally:
        os.close(top)
    return answers


def _delete_in_folder(root: str, top: int, folder: str, keys: Sequence[str]) -> Answers:
    try:
        descriptor = _open_below(root, top, folder)
    except (OSError, ObjectNotDeleted) as error:
        return dict.fromkeys(keys, error)
    try:
        return {key: _error_of(_unlink, descriptor, os.path.basename(key)) for key in keys}
    finally:
        os.close(descriptor)


def _open_below(root: str, top: int, folder: str) -> int:
    try:
        return open_folder(top, folder.split("/") if folder else [])
    except OSError as error:
        # On Linux, a symbolic link is reported as something that is not a folder.
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
    real = os.path.realpath(os.path.join(root, folder))
    below = os.path.relpath(real, os.path.realpath(root))
    parts = [] if below == os.curdir else below.split(os.sep)
    if os.pardir in parts:
        raise ObjectNotDeleted(f"a symbolic link leads the path {folder!r} out of the store's folder")
    while not os.path.lexists(real):
        real = os.path.dirname(real)
    if stat.S_ISREG(os.lstat(real).st_mode):  # and not a link that was created meanwhile
        raise FileNotFoundError(errno.ENOENT, "a part of the path is a file", folder)
    return open_folder(top, parts)


def open_folder(top: int, parts: Sequence[str]) -> int:
    """Return a descriptor of the folder below an open one, without following symbolic links.

    Raises:
      OSError: When a component is missing or not a folder.
    """
    descriptor = os.dup(top)
    for part in parts:
        try:
            following = os.open(part, _FOLDER, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = following
    return descriptor


def _is_throttled(answer: BaseException | None) -> bool:
    return answer is not None and _THROTTLED.search(str(answer).partition("\n")[0]) is not None


def _is_missing(answer: BaseException) -> bool:
    too_long = isinstance(answer, OSError) and answer.errno == errno.ENAMETOOLONG  # no file can have such a name
    return too_long or isinstance(answer, FileNotFoundError)


def _unlink(descriptor: int, name: str) -> None:
    os.unlink(name, dir_fd=descriptor)


def _error_of(delete: Callable[[Any, str], object], place: Any, key: str) -> Exception | None:
    try:
        delete(place, key)
    except Exception as error:
        return error
    return None


def _parts(paths: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (paths[start : start + size] for start in range(0, len(paths), size))
