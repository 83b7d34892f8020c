"""Deleting many objects of one store, so that one that is refused costs itself only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from housekeeping.sweeps import ObjectNotDeleted, ObjectStoreUnavailable
from housekeeping.sweeps import logger as named_logger
from housekeeping.workers.object_storage.local_files import delete_file
from housekeeping.workers.object_storage.stores import AT_HAND, BULK, ObjectStore

logger = named_logger(__name__)

#: Requests under way at once where each deletes one object.
_AT_ONCE: Final = 32
#: So many times that are deleted in milliseconds where the objects are local files.
_LOCAL_PARTS: Final = 8
#: So many refusals and not one object deleted: it is the store that refuses, a missing right most likely.
_REFUSES_ALL: Final = 100


@dataclass(slots=True)
class Deleted:
    """What became of some objects; one that is in neither was not tried, or nobody knows.

    Attributes:
      gone: Paths whose object is not there any more, or never was.
      refused: Path -> why its object may still be there.
    """

    gone: list[str] = field(default_factory=list)
    refused: dict[str, ObjectNotDeleted] = field(default_factory=dict)


class Deletion:
    """The deletions of one run in one store.

    Attributes:
      away: Why the store is left alone for the rest of the run; null while it works.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.away: ObjectStoreUnavailable | None = None
        self._any_deleted = False
        self._refusals = 0
        self._still_there()

    def delete(self, paths: Sequence[str], time_is_up: Callable[[], bool], check: Callable[[], None]) -> Deleted:
        """Delete the objects, in bulk where the store can, else and if that fails each on its own.

        Never raises for a store: what it would not do is in the answer, or in `away`.

        Parameters:
          time_is_up: Asked between requests, whether to leave the rest.
          check: Called before each request, of local files before some hundred; what it raises ends the deletion.
        """
        try:
            if self._in_bulk(paths, check):
                return Deleted(list(paths))
        except ObjectStoreUnavailable as error:
            self._set_aside(error)
            return Deleted()
        found = Deleted()
        between_checks = _LOCAL_PARTS if self.store.address.scheme in AT_HAND else 1
        for number, some in enumerate(_parts(paths, _AT_ONCE)):
            if number % between_checks == 0:
                check()
            self._each(some, found)
            if self.away is not None or (some[-1] != paths[-1] and time_is_up()):
                break
        return found

    def _in_bulk(self, paths: Sequence[str], check: Callable[[], None]) -> bool:
        """Delete all in one go; False when some may be left, or this store has no such request."""
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
                # One error for all of them, which names one: which are left shows only if each is asked for.
                self.store.look()
                return False
        self._any_deleted = True
        return True

    def _each(self, paths: Sequence[str], found: Deleted) -> None:
        answers = self._answers(paths)
        unsure = [path for path, answer in zip(paths, answers, strict=True) if answer is not None]
        if unsure and not self._still_there():
            return
        for path, answer in zip(paths, answers, strict=True):
            # The store is there, so what it does not find is gone.
            if answer is None or isinstance(answer, FileNotFoundError):
                found.gone.append(path)
                self._any_deleted = self._any_deleted or answer is None
            else:
                found.refused[path] = ObjectNotDeleted(self.store.in_words(answer))
                self._refusals += 1
        if self._refusals >= _REFUSES_ALL and not self._any_deleted:
            last = next(reversed(found.refused.values()))
            self._set_aside(self.store.unavailable(f"refuses every deletion: {last}"))

    def _answers(self, paths: Sequence[str]) -> list[BaseException | None]:
        """What the store said of each: null when it deleted it."""
        keys = [self.store.address.key(path) for path in paths]
        try:
            client = self.store.client()
        except ObjectStoreUnavailable as error:
            return [error] * len(keys)
        if self.store.address.scheme == "file":
            # The client would follow a symbolic link out of the folder.
            return [_answer(delete_file, self.store.address.place, key) for key in keys]
        if self.store.address.scheme in AT_HAND:
            import obstore

            return [_answer(obstore.delete, client, key) for key in keys]
        return asyncio.run(_answers_at_once(client, keys))

    def _still_there(self) -> bool:
        try:
            self.store.look()
        except ObjectStoreUnavailable as error:
            self._set_aside(error)
        return self.away is None

    def _set_aside(self, error: ObjectStoreUnavailable) -> None:
        self.away = error
        logger.error("Object store is left alone for this run", location=self.store.location, error=str(error))


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
