"""Deletes refs with the git program: one process a batch, all of it or nothing."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Final

from housekeeping.sweeps import shortened
from housekeeping.workers.batched_git_ref_updates.ref_deletion import (
    RefDeletionFailed,
    RefNameTooLong,
    RefsRefused,
)

#: A batch takes some 5 ms, 150 ms beside 300,000 packed refs; below the minute after which a run is taken for dead.
TIMEOUT: Final = timedelta(seconds=30)

_LARGEST_ANSWER: Final = 8192  # bytes of what git says that are looked at; the rest is read and dropped
_LONGEST_LINE: Final = 500  # characters of an error; git quotes a name twice
_TOO_LONG: Final = b": File name too long"
_PAUSE_MS: Final = 100
#: The configuration of a command wins over the repository's own.
_CONFIGURATION: Final = (
    "core.hooksPath=/dev/null",
    # Repositories belong to the git server's user; git would refuse those of another.
    "safe.directory=*",
    # ms. A ref's lock is held for a moment or for ever; its row is met again in a minute.
    "core.filesRefLockTimeout=20",
    # ms. Every deletion needs this one; packing hundreds of thousands of refs holds it for some 300.
    "core.packedRefsTimeout=1000",
)
#: Of nothing but the repository's own configuration is anything read, and nothing is asked of a terminal.
_ENVIRONMENT: Final = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    # Who did it, where the repository keeps a log of its refs.
    "GIT_COMMITTER_NAME": "housekeeping",
    "GIT_COMMITTER_EMAIL": "housekeeping@localhost",
    "HOME": os.devnull,
    "LC_ALL": "C",
}
#: With one of these it is the repository that is at fault, not a ref; having spaces, they are in no ref's name.
_NO_REF_AT_FAULT: Final = (
    b"not a git repository",
    b"dubious ownership",
    b"bad config",
    b"repository extension",
    b"repo version",
    b"No space left on device",
    b"Disk quota exceeded",
    b"Read-only file system",
)


class GitCli:
    """The default `RefDeletion`: ``git update-ref --stdin`` on a bare repository of this machine.

    Parameters:
      program: Its name or path.
      timeout: After this long a process is killed.
    """

    def __init__(self, program: str = "git", timeout: timedelta = TIMEOUT) -> None:
        self._program = program
        self._timeout = timeout

    def delete(self, repository: PurePath, refs: Sequence[str]) -> None:
        """Delete them all in one transaction of git; see `RefDeletion.delete`.

        Raises:
          RefsRefused: When git names a ref that it cannot delete, such as a locked one.
          RefNameTooLong: When the only ref is not there, and its name is too long for a file or git's lock file.
          RefDeletionFailed: When the program is missing, hangs, or cannot use the repository.
        """
        if _gone(repository):
            return
        orders = b"".join(b"delete %s\0\0" % ref.encode() for ref in refs)
        # -z: a name ends at a byte that none can hold, so that no name is taken for more than a name.
        status, said = self._ended(Path(repository), ["update-ref", "--no-deref", "-z", "--stdin"], orders)
        if status == 0 or _gone(repository):
            return
        if len(refs) == 1 and b"' exists; cannot create '" in said:
            # A ref by whose name this one would be a folder, or the other way round: so this one is not there.
            return
        line = shortened(said.decode(errors="replace").strip().partition("\n")[0], _LONGEST_LINE)
        line = line or f"it ended with status {status}"
        packed_refs = os.fsencode(repository) + b"/packed-refs"
        if status < 0 or any(sign in said for sign in (packed_refs, *_NO_REF_AT_FAULT)):
            raise RefDeletionFailed(f"git cannot delete refs of {repository}: {line}")
        if len(refs) == 1 and _is_too_long(repository, refs[0], said) and not self._has(Path(repository), refs[0]):
            raise RefNameTooLong(f"git: {line}")
        raise RefsRefused(f"git: {line}")

    def _has(self, repository: Path, ref: str) -> bool:
        """Return whether the ref is there, packed for example; True if unknown."""
        name = ref.encode()
        # The first of those it lists is the ref itself, before any for which it would be a folder.
        status, said = self._ended(repository, ["for-each-ref", "--count=1", "--format=%(refname)", os.fsdecode(name)])
        return status != 0 or name in said.splitlines()

    def version(self) -> str | None:
        """What the program says of its version; None when it is not there."""
        try:
            asked = subprocess.run(
                [self._program, "--version"], capture_output=True, text=True, timeout=self._timeout.total_seconds()
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return asked.stdout.strip()[:100] or None

    def _ended(self, repository: Path, arguments: Sequence[str], orders: bytes = b"") -> tuple[int, bytes]:
        """Exit status of a git process, and the beginning of what it said."""
        command = [self._program]
        for setting in _CONFIGURATION:
            command += ["-c", setting]
        command += arguments
        environment = {"PATH": os.environ.get("PATH", os.defpath), "GIT_DIR": str(repository), **_ENVIRONMENT}
        with tempfile.TemporaryFile() as file:
            file.write(orders)
            file.seek(0)
            try:
                process = subprocess.Popen(
                    command,
                    stdin=file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd="/",
                    process_group=0,  # Ctrl-C in a terminal is for the run, which ends its git itself
                )
            except OSError as error:
                raise RefDeletionFailed(f"the git program {self._program!r} does not start: {error.strerror}") from None
        return self._watched(process, repository)

    def _watched(self, process: subprocess.Popen[bytes], repository: Path) -> tuple[int, bytes]:
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._timeout.total_seconds(), end)
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        try:
            with process.stdout as answers:
                said = _read(answers.fileno())
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
        if late.is_set():
            raise RefDeletionFailed(f"git did not end within {self._timeout.total_seconds():g} s on {repository}")
        return status, said


def _is_too_long(repository: PurePath, ref: str, said: bytes) -> bool:
    # git cuts what it says at 4096 bytes: of a path as long as that, it never comes to the reason.
    path = b"%s/./%s.lock" % (os.fsencode(repository), ref.encode())
    return _TOO_LONG in said or len(path) >= os.pathconf("/", "PC_PATH_MAX")


def _read(answers: int) -> bytes:
    """Return the beginning of what git says, when it has said all.

    Waits for short times, because an interrupt of this thread arrives only between two waits.
    """
    said = b""
    waiting = select.poll()
    waiting.register(answers)
    while True:
        if not waiting.poll(_PAUSE_MS):
            continue
        part = os.read(answers, _LARGEST_ANSWER)
        if not part:
            return said
        said += part[: _LARGEST_ANSWER - len(said)]


def _gone(repository: PurePath) -> bool:
    """Whether there surely is no such repository; one that merely cannot be looked at is not gone.

    Raises:
      RefDeletionFailed: When nobody can tell: a folder above that may not be entered, a file server that is away.
    """
    try:
        os.lstat(repository)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise RefDeletionFailed(f"the repository {repository} cannot be looked at: {error.strerror}") from None
    return False
