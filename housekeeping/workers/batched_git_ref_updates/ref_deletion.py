"""Deletes refs in batches, and finds the one that makes a batch fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Protocol

from housekeeping.sweeps import HousekeepingError
from housekeeping.sweeps import logger as named_logger

logger = named_logger(__name__)


class RefsRefused(HousekeepingError):
    """A batch could not be deleted because of some of its refs; none of it is deleted."""


class RefNameTooLong(RefsRefused):
    """The repository can hold no ref of this name, and has none: the name is too long for its files."""


class RefDeletionFailed(HousekeepingError):
    """No ref of the repository can be deleted now, or nobody knows whether they were; trying again may help."""


class RefDeletion(Protocol):
    """Deletes refs of a repository; replaceable, see `backends`."""

    def delete(self, repository: PurePath, refs: Sequence[str]) -> None:
        """Delete them all, each itself and not what it points to, or none of them.

        A ref that is not there, and a repository that is not there, are deleted already. Once it returns, they are
        gone for good. Asked for the same twice, it does no harm.

        Parameters:
          refs: Valid names below ``refs/``, each once.

        Raises:
          RefsRefused: When one of them cannot be deleted.
          RefNameTooLong: When the only one is too long for the repository, and is not there.
          RefDeletionFailed: When the reason is none of them.
        """


#: A ref, and why it could not be deleted; null: it is gone.
Fate = tuple[str, RefsRefused | None]


def delete_refs(
    deletion: RefDeletion, repository: PurePath, refs: Sequence[str], time_is_up: Callable[[], bool] = lambda: False
) -> Iterator[Fate]:
    """Delete a batch; should it be refused, in halves, until what is refused is alone.

    Parameters:
      time_is_up: Asked between two halves; the refs that are left then have no fate.

    Raises:
      RefDeletionFailed: As `RefDeletion.delete`; what was yielded before stays true.
    """
    parts: list[Sequence[str]] = [refs] if refs else []
    while parts:
        part = parts.pop()
        try:
            deletion.delete(repository, part)
        except RefsRefused as refused:
            if len(part) == 1:
                yield part[0], refused
                continue
            if part is refs:
                logger.warning("A batch of refs was refused and is taken apart", refs=len(refs), error=str(refused))
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
        else:
            yield from ((ref, None) for ref in part)
        if parts and time_is_up():
            return
