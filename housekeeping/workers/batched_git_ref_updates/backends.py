"""Backends of the cleanup, which an application can replace: they locate repositories and delete refs.

::

    from housekeeping.workers.batched_git_ref_updates.backends import backends

    backends.replace(repositories=ByStorage(), deletion=GitalyClient())
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from housekeeping.workers.batched_git_ref_updates.git_cli import GitCli
from housekeeping.workers.batched_git_ref_updates.ref_deletion import RefDeletion
from housekeeping.workers.batched_git_ref_updates.repositories import HashedRepositories, Repositories


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
        """Set the folder of the default repositories."""
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
