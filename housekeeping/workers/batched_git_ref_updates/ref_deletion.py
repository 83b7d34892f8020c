"""Valid ref names, and deletion of refs in batches, with bisection to find the ref that makes a batch fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Final, Protocol

from housekeeping.sweeps import HousekeepingError
from housekeeping.sweeps import logger as named_logger

logger = named_logger(__name__)

#: What git rejects anywhere in a name: control characters, spaces, its own notation, and components that are empty,
#: start with a dot or end with ``.lock``. A slash at either end or a double slash has an empty component.
_REFUSED: Final = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|(^|/)\.|\.lock(/|$)|//|/$|^/|\.$")
_BELOW: Final = "refs/"


def is_ref_name(name: str) -> bool:
    """Return whether git accepts this as the full name of a ref below ``refs/``.

    Names that begin with ``-``, ``HEAD`` and other names outside of ``refs/`` are rejected, and so is text that cannot
    be encoded (a lone surrogate).
    """
    return name.startswith(_BELOW) and _REFUSED.search(name) is None and _has_bytes(name)


def _has_bytes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class RefsRefused(HousekeepingError):
    """Error for a batch that contains a ref that cannot be deleted; nothing was deleted."""


class RefNameTooLong(RefsRefused):
    """Error for a ref whose name is too long for the repository's files; such a ref cannot exist."""


class RefDeletionFailed(HousekeepingError):
    """Error for a repository whose refs cannot be deleted now; a retry may help."""


class RefDeletion(Protocol):
    """Backend that deletes refs of a repository; replaceable, see `backends`."""

    def delete(self, repository: PurePath, refs: Sequence[str]) -> None:
        """Delete all of the refs or none. Symbolic refs are deleted themselves, not their targets.

        A ref or repository that does not exist counts as deleted. After the return the refs are gone for good. A
        repetition does no harm.

        Parameters:
          refs: Valid names below ``refs/`` without duplicates.

        Raises:
          RefsRefused: When one of the refs cannot be deleted.
          RefNameTooLong: When the only ref is too long for the repository and does not exist.
          RefDeletionFailed: For any reason that is not a ref's.
        """


#: A ref, and the reason why it could not be deleted, or None when it is gone.
RefResult = tuple[str, RefsRefused | None]


def delete_refs(
    deletion: RefDeletion,
    repository: PurePath,
    refs: Sequence[str],
    time_is_up: Callable[[], bool] = lambda: False,
    check: Callable[[], None] = lambda: None,
) -> Iterator[RefResult]:
    """Delete a batch of refs. A refused batch is bisected until the refused refs are alone.

    Parameters:
      time_is_up: Called between two parts; True leaves the remaining refs without a result.
      check: Called before each part. What it raises ends the deletion.

    Raises:
      RefDeletionFailed: As for `RefDeletion.delete`; results yielded before stay true.
    """
    parts: list[Sequence[str]] = [refs] if refs else []
    while parts:
        part = parts.pop()
        check()
        try:
            deletion.delete(repository, part)
        except RefsRefused as refused:
            if len(part) == 1:
                yield part[0], refused
                continue
            if part is refs:
                logger.warning("Batch of refs refused; bisecting", refs=len(refs), error=str(refused))
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
        else:
            yield from ((ref, None) for ref in part)
        if parts and time_is_up():
            return
