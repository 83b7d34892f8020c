"""What an application may replace: where repositories are, and what deletes their refs.

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
    """What the cleanup of a project works with; the application's where it has said so, else the defaults."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._repositories: Repositories | None = None
        self._deletion: RefDeletion | None = None

    def replace(self, repositories: Repositories | None = None, deletion: RefDeletion | None = None) -> None:
        """Use these from the next run on; null: the default again."""
        self._repositories, self._deletion = repositories, deletion

    def use_root(self, root: Path | None) -> None:
        """Where the default finds repositories."""
        self._root = root

    @property
    def repositories(self) -> Repositories:
        """Below ``HOUSEKEEPING_REPOSITORIES_ROOT`` unless replaced."""
        return self._repositories or HashedRepositories(self._root)

    @property
    def deletion(self) -> RefDeletion:
        """The git program unless replaced."""
        return self._deletion or GitCli()


backends: Final = Backends()
