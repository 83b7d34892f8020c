"""Backends of the cleanup, which an application can replace: they locate repositories and delete refs.

::

    from housekeeping.workers.batched_git_ref_updates.backends import backends

    backends.replace(repositories=ByStorage(), deletion=GitalyClient())
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePath
from typing import Final, Protocol

from housekeeping.sweeps import HousekeepingError, SettingsError
from housekeeping.workers.batched_git_ref_updates.git_cli import GitCli
from housekeeping.workers.batched_git_ref_updates.ref_deletion import RefDeletion

_VARIABLE: Final = "HOUSEKEEPING_REPOSITORIES_ROOT"


class Repositories(Protocol):
    """Backend that locates a project's repository; replaceable, see `backends`."""

    def locate(self, project_id: int) -> PurePath:
        """Return the repository in the form that the ref deletion in use understands; it need not exist.

        Raises:
          HousekeepingError: When no repository can be located now.
        """


class HashedRepositories:
    """Bare repositories below a folder, in subfolders by the hash of the project id.

    Parameters:
      root: The folder. With None every call raises an error that names the setting.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root

    def locate(self, project_id: int) -> Path:
        """Return ``<root>/@hashed/ab/cd/<sha256 of the decimal project id>.git``.

        Raises:
          SettingsError: When no root is set.
          HousekeepingError: When the root or its folder ``@hashed`` does not exist. If the disk is not mounted, which
            may leave an empty folder behind, every ref would look deleted.
        """
        if self._root is None:
            raise SettingsError(f"{_VARIABLE} is not set; it should be a folder such as /srv/git/repositories")
        if not (self._root / "@hashed").is_dir():
            raise HousekeepingError(
                f"{_VARIABLE} is {str(self._root)!r}, which has no folder @hashed; is the disk mounted?"
            )
        return self._root.resolve() / hashed_path(project_id)


def hashed_path(project_id: int) -> PurePath:
    """Return ``@hashed/ab/cd/<digest>.git``, where ab and cd are the digest's first two pairs of characters."""
    digest = hashlib.sha256(str(project_id).encode()).hexdigest()
    return PurePath("@hashed", digest[:2], digest[2:4], f"{digest}.git")


class Backends:
    """Backends that the cleanup uses: the application's, or the defaults."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._repositories: Repositories | None = None
        self._deletion: RefDeletion | None = None

    def replace(self, repositories: Repositories | None = None, deletion: RefDeletion | None = None) -> None:
        """Use these backends from the next run on; None restores the default."""
        self._repositories, self._deletion = repositories, deletion

    def use_root(self, root: Path | None) -> None:
        """Set the root folder in which the default backend locates repositories."""
        self._root = root

    @property
    def repositories(self) -> Repositories:
        """Backend that locates repositories, by default below ``HOUSEKEEPING_REPOSITORIES_ROOT``."""
        return self._repositories or HashedRepositories(self._root)

    @property
    def deletion(self) -> RefDeletion:
        """Backend that deletes refs, by default the git program."""
        return self._deletion or GitCli()


backends: Final = Backends()
