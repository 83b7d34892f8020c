"""Bare git repositories for the tests, created and inspected by the real git program."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.internals.workers import hashed_path

_ENVIRONMENT = {
    "PATH": os.environ.get("PATH", os.defpath),
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@localhost",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@localhost",
    "LC_ALL": "C",
}


class Bare:
    """Bare repository with one commit that every ref points to."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--bare", *options, str(path))
        tree = self.git("hash-object", "-w", "-t", "tree", "--stdin")
        self.commit = self.git("commit-tree", "-m", "all there is", tree)

    def git(self, *arguments: str, orders: str = "") -> str:
        """Run git and return its output."""
        environment = _ENVIRONMENT if arguments[0] == "init" else {**_ENVIRONMENT, "GIT_DIR": str(self.path)}
        ended = subprocess.run(
            ["git", "-c", "safe.directory=*", *arguments],
            input=orders.encode(),
            env=environment,
            capture_output=True,
            check=True,
        )
        return ended.stdout.decode().strip()

    def add(self, *refs: str) -> None:
        """Create loose refs."""
        self.git("update-ref", "--stdin", "-z", orders="".join(f"create {ref}\0{self.commit}\0" for ref in refs))

    def add_many(self, refs: Iterable[str], *, packed: bool) -> None:
        """Create refs without git, which is slow for thousands; the repository must be empty."""
        if packed:
            lines = "".join(f"{self.commit} {ref}\n" for ref in sorted(refs))
            (self.path / "packed-refs").write_text(f"# pack-refs with: peeled fully-peeled sorted \n{lines}")
            return
        for ref in refs:
            file = self.path / ref
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{self.commit}\n")

    def pack(self) -> None:
        """Pack all refs."""
        self.git("pack-refs", "--all")

    def refs(self) -> list[str]:
        """Return the names of all refs except dangling symbolic refs."""
        return self.git("for-each-ref", "--format=%(refname)").split()

    def lock(self, ref: str) -> Path:
        """Return the path of a ref's lock file."""
        lock = self.path / f"{ref}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
        return lock

    def hook(self, name: str, script: str) -> None:
        """Create a hook in the repository."""
        file = self.path / "hooks" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def remove(self) -> None:
        """Remove the repository."""
        shutil.rmtree(self.path)


#: Makes the repository of a project, with these loose refs.
MakeRepository = Callable[..., Bare]


def made(root: Path, project_id: int, *refs: str) -> Bare:
    """Create a project's repository below the root, with these loose refs."""
    repository = Bare(root / hashed_path(project_id))
    if refs:
        repository.add(*refs)
    return repository
