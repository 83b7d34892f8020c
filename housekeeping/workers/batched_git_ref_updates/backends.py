"""Replaceable backends of the cleanup: where repositories are, and how refs are deleted.

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
    """Backends in use: those of the application, or the defaults."""

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
        """Repositories below ``HOUSEKEEPING_REPOSITORIES_ROOT`` unless replaced."""
        return self._repositories or HashedRepositories(self._root)

    @property
    def deletion(self) -> RefDeletion:
        """Deletion by the git program unless replaced."""
        return self._deletion or GitCli()


backends: Final = Backends()
