"""Deletion of refs with the git program: one process and one git transaction per batch."""

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

#: A batch takes about 5 ms, or 150 ms beside 300,000 packed refs. Below the minute after which a run counts as lost.
TIMEOUT: Final = timedelta(seconds=30)
#: Time in which git removes its lock files after SIGTERM. A killed git leaves them, and they block the repository.
GRACE: Final = timedelta(seconds=5)

_LARGEST_ANSWER: Final = 8192  # bytes of git's output that are kept; the rest is read and discarded
_LONGEST_LINE: Final = 500  # characters of an error; git quotes a name twice
_TOO_LONG: Final = b": File name too long"
_PAUSE_MS: Final = 100
#: Settings on the command line take precedence over the repository's configuration.
_CONFIGURATION: Final = (
    "core.hooksPath=/dev/null",
    # Repositories belong to the git server's user; git refuses those of another user.
    "safe.directory=*",
    # ms. A ref's lock is held for a moment or for ever; its row is read again in a minute.
    "core.filesRefLockTimeout=20",
    # ms. Every deletion needs this lock; packing hundreds of thousands of refs holds it for about 300 ms.
    "core.packedRefsTimeout=1000",
)
#: Read no configuration except the repository's own, and never prompt.
_ENVIRONMENT: Final = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    # The author in the repository's reflog.
    "GIT_COMMITTER_NAME": "housekeeping",
    "GIT_COMMITTER_EMAIL": "housekeeping@localhost",
    "HOME": os.devnull,
    "LC_ALL": "C",
}
#: Errors of the repository, not of a ref. They contain spaces, so they cannot be part of a ref's name.
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
    """Default `RefDeletion`: ``git update-ref --stdin`` on a local bare repository.

    Parameters:
      program: Name or path of git.
      timeout: Time after which a process is terminated.
      grace: Time after which a terminated process is killed.
    """

    def __init__(self, program: str = "git", timeout: timedelta = TIMEOUT, grace: timedelta = GRACE) -> None:
        self._program = program
        self._timeout = timeout
        self._grace = grace

    def delete(self, repository: PurePath, refs: Sequence[str]) -> None:
        """Delete the refs in one git transaction; see `RefDeletion.delete`.

        Raises:
          RefsRefused: When git names a ref that it cannot delete, such as a locked one.
          RefNameTooLong: When the only ref does not exist, and its name is too long for a file or for git's lock file.
          RefDeletionFailed: When git is missing, hangs, or cannot use the repository.
        """
        if _gone(repository):
            return
        commands = b"".join(b"delete %s\0\0" % ref.encode() for ref in refs)
        # -z: names end with a NUL byte, which no name can contain.
        status, output = self._run(Path(repository), ["update-ref", "--no-deref", "-z", "--stdin"], commands)
        if status == 0 or _gone(repository):
            return
        if len(refs) == 1 and b"' exists; cannot create '" in output:
            # Another ref's name is a folder of this one or below it, so this ref does not exist.
            return
        line = shortened(output.decode(errors="replace").strip().partition("\n")[0], _LONGEST_LINE)
        line = line or f"it ended with status {status}"
        packed_refs = os.fsencode(repository) + b"/packed-refs"
        if status < 0 or any(message in output for message in (packed_refs, *_NO_REF_AT_FAULT)):
            raise RefDeletionFailed(f"git cannot delete refs of {repository}: {line}")
        if len(refs) == 1 and _is_too_long(repository, refs[0], output) and not self._has(Path(repository), refs[0]):
            raise RefNameTooLong(f"git: {line}")
        raise RefsRefused(f"git: {line}")

    def _has(self, repository: Path, ref: str) -> bool:
        """Return whether the ref exists, for example packed; True if unknown."""
        name = ref.encode()
        # The ref itself is listed first, before refs below that name.
        status, output = self._run(repository, ["for-each-ref", "--count=1", "--format=%(refname)", os.fsdecode(name)])
        return status != 0 or name in output.splitlines()

    def version(self) -> str | None:
        """Return the output of ``git --version``, or None when git is missing."""
        try:
            finished = subprocess.run(
                [self._program, "--version"], capture_output=True, text=True, timeout=self._timeout.total_seconds()
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return finished.stdout.strip()[:100] or None

    def _run(self, repository: Path, arguments: Sequence[str], commands: bytes = b"") -> tuple[int, bytes]:
        """Run git; return its exit status and the beginning of its output."""
        command = [self._program]
        for setting in _CONFIGURATION:
            command += ["-c", setting]
        command += arguments
        environment = {"PATH": os.environ.get("PATH", os.defpath), "GIT_DIR": str(repository), **_ENVIRONMENT}
        with tempfile.TemporaryFile() as file:
            file.write(commands)
            file.seek(0)
            try:
                process = subprocess.Popen(
                    command,
                    stdin=file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd="/",
                    process_group=0,  # Ctrl-C in a terminal must reach only the run, which then ends its git process
                )
            except OSError as error:
                raise RefDeletionFailed(f"the git program {self._program!r} does not start: {error.strerror}") from None
        return self._wait(process, repository)

    def _wait(self, process: subprocess.Popen[bytes], repository: Path) -> tuple[int, bytes]:
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            self._end(process)

        timer = threading.Timer(self._timeout.total_seconds(), end)
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        try:
            with process.stdout as answers:
                output = _read(answers.fileno())
            status = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                self._end(process)
        if timed_out.is_set():
            raise RefDeletionFailed(f"git did not end within {self._timeout.total_seconds():g} s on {repository}")
        return status, output

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(self._grace.total_seconds())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_too_long(repository: PurePath, ref: str, output: bytes) -> bool:
    # git truncates its output at 4096 bytes, so with a path that long the reason is missing.
    path = b"%s/./%s.lock" % (os.fsencode(repository), ref.encode())
    return _TOO_LONG in output or len(path) >= os.pathconf("/", "PC_PATH_MAX")


def _read(answers: int) -> bytes:
    """Read git's output to its end and return the beginning.

    Polls with a short timeout, because an interrupt of this thread is delivered only between two waits.
    """
    output = b""
    poll = select.poll()
    poll.register(answers)
    while True:
        if not poll.poll(_PAUSE_MS):
            continue
        part = os.read(answers, _LARGEST_ANSWER)
        if not part:
            return output
        output += part[: _LARGEST_ANSWER - len(output)]


def _gone(repository: PurePath) -> bool:
    """Return whether the repository certainly does not exist.

    Raises:
      RefDeletionFailed: When that is unknown: a folder above may not be entered, or a file server is unavailable.
    """
    try:
        os.lstat(repository)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise RefDeletionFailed(f"the repository {repository} cannot be accessed: {error.strerror}") from None
    return False
