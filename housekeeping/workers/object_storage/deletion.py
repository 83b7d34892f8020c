"""Deletion of many objects of one store; an object that is refused does not affect the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from housekeeping.sweeps import ObjectNotDeleted, ObjectStoreUnavailable
from housekeeping.sweeps import logger as named_logger
from housekeeping.workers.object_storage.local_files import delete_file
from housekeeping.workers.object_storage.stores import BULK, LOCAL, ObjectStore

logger = named_logger(__name__)

#: Concurrent requests where each request deletes one object.
_AT_ONCE: Final = 32
#: Groups of local files between two checks: this many times `_AT_ONCE` files are deleted in milliseconds.
_LOCAL_PARTS: Final = 8
#: After this many refusals without a deletion, the store itself refuses; most likely a permission is missing.
_REFUSES_ALL: Final = 100


@dataclass(slots=True)
class Deleted:
    """Results of a deletion. An object in neither attribute was not tried, or its state is unknown.

    Attributes:
      gone: Paths whose object does not exist any more, or never did.
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
        between_checks = _LOCAL_PARTS if self.store.address.scheme in LOCAL else 1
        for number, some in enumerate(_parts(paths, _AT_ONCE)):
            if number % between_checks == 0:
                check()
            self._each(some, found)
            if self.unavailable is not None or (some[-1] != paths[-1] and time_is_up()):
                break
        return found

    def _in_bulk(self, paths: Sequence[str], check: Callable[[], None]) -> bool:
        """Delete all in bulk; return False if some may be left or the store has no such request."""
        size = BULK.get(self.store.address.scheme)
        if size is None or len(paths) == 1:
            return False
        import obstore

        client = self.store.client()
        for some in _parts(paths, size):
            check()
            try:
                obstore.delete(client, [self.store.address.key(path) for path in some])
            except Exception:
                # One error for all objects, which names one of them: only requests for each show which are left.
                self.store.check_access()
                return False
        self._any_deleted = True
        return True

    def _each(self, paths: Sequence[str], found: Deleted) -> None:
        answers = self._answers(paths)
        unsure = [path for path, answer in zip(paths, answers, strict=True) if answer is not None]
        if unsure and not self._is_available():
            return
        for path, answer in zip(paths, answers, strict=True):
            # The store answers, so an object that it does not find is gone.
            if answer is None or isinstance(answer, FileNotFoundError):
                found.gone.append(path)
                self._any_deleted = self._any_deleted or answer is None
            else:
                found.refused[path] = ObjectNotDeleted(self.store.describe_error(answer))
                self._refusals += 1
        if self._refusals >= _REFUSES_ALL and not self._any_deleted:
            last = next(reversed(found.refused.values()))
            self._mark_unavailable(self.store.unavailable(f"refuses every deletion: {last}"))

    def _answers(self, paths: Sequence[str]) -> list[BaseException | None]:
        """Return the store's error for each object, or None where it was deleted."""
        keys = [self.store.address.key(path) for path in paths]
        try:
            client = self.store.client()
        except ObjectStoreUnavailable as error:
            return [error] * len(keys)
        if self.store.address.scheme == "file":
            # The client would follow a symbolic link out of the folder.
            return [_answer(delete_file, self.store.address.place, key) for key in keys]
        if self.store.address.scheme in LOCAL:
            import obstore

            return [_answer(obstore.delete, client, key) for key in keys]
        return asyncio.run(_answers_at_once(client, keys))

    def _is_available(self) -> bool:
        try:
            self.store.check_access()
        except ObjectStoreUnavailable as error:
            self._mark_unavailable(error)
        return self.unavailable is None

    def _mark_unavailable(self, error: ObjectStoreUnavailable) -> None:
        self.unavailable = error
        logger.error("Object store unavailable; ignored for this run", location=self.store.location, error=str(error))


def _answer(delete: Callable[[Any, str], object], store: Any, key: str) -> Exception | None:
    try:
        delete(store, key)
    except Exception as error:
        return error
    return None


async def _answers_at_once(client: Any, keys: Sequence[str]) -> list[BaseException | None]:
    import obstore

    return await asyncio.gather(*(obstore.delete_async(client, key) for key in keys), return_exceptions=True)


def _parts(paths: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (paths[start : start + size] for start in range(0, len(paths), size))
