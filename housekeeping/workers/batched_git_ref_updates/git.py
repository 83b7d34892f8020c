"""Deletion of git refs by the git program, and the backends of the cleanup, which an application can replace.

::

    from housekeeping.workers.batched_git_ref_updates.git import backends

    backends.replace(repositories=ByStorage(), deletion=GitalyClient())
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Final, Protocol

from housekeeping import HousekeepingError, SettingsError, shortened
from housekeeping import logger as named_logger

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


class RefDeletionUnavailable(RefDeletionFailed):
    """Error for a machine or service that cannot delete refs now, in any repository."""

    concerns_all = True


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
          RefDeletionFailed: For any reason that is not a ref's. The cleanup of this repository is deferred.
          RefDeletionUnavailable: When no repository's refs can be deleted now. No cleanup is deferred.
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
#: Errors of the repository although git names a ref: the system's, of its files, its disk or the machine. Each deletion
#: would get the same one. They contain spaces, so they cannot be part of a ref's name.
_REPOSITORY_ERRORS: Final = (
    b": Permission denied",
    b": Operation not permitted",
    b": Read-only file system",
    b": No space left on device",
    b": Disk quota exceeded",
    b": Input/output error",
    b": Structure needs cleaning",
    b": Stale file handle",
    b": Transport endpoint is not connected",
    b": Connection timed out",
    b": Too many open files",
    b": Cannot allocate memory",
)
#: A ref in git's output, which may cut off its end. An error that names none is the repository's.
_NAMED_REF: Final = re.compile(rb"(?<![^ '])refs/")


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
        is_a_ref_at_fault = status > 0 and _NAMED_REF.search(output) is not None
        if not is_a_ref_at_fault or any(message in output for message in (packed_refs, *_REPOSITORY_ERRORS)):
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
                    process_group=0,  # Ctrl-C in a terminal must reach only the run, which ends after its batch
                )
            except OSError as error:
                raise RefDeletionUnavailable(
                    f"the git program {self._program!r} does not start: {error.strerror}"
                ) from None
        return self._wait(process, repository)

    def _wait(self, process: subprocess.Popen[bytes], repository: Path) -> tuple[int, bytes]:
        timeout_s = self._timeout.total_seconds()
        end = time.monotonic() + timeout_s
        assert process.stdout is not None
        try:
            with process.stdout as answers:
                output = _read(answers.fileno(), end)
            _wait_for_end(process, end)
            return process.wait(max(0, end - time.monotonic())), output
        except subprocess.TimeoutExpired:
            raise RefDeletionFailed(f"git did not end within {timeout_s:g} s on {repository}") from None
        finally:
            if process.poll() is None:
                self._end(process)

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


def _read(answers: int, end: float) -> bytes:
    """Read git's output from this file descriptor to its end; return its first bytes."""
    output = b""
    while True:
        _wait_until_readable(answers, end)
        part = os.read(answers, _LARGEST_ANSWER)
        if not part:
            return output
        output += part[: _LARGEST_ANSWER - len(output)]


def _wait_for_end(process: subprocess.Popen[bytes], end: float) -> None:
    """Wait without the pauses of `Popen.wait`, where the system can."""
    if sys.platform == "linux":
        with suppress(OSError):  # not allowed here
            file = os.pidfd_open(process.pid)
            try:
                _wait_until_readable(file, end)
            finally:
                os.close(file)


def _wait_until_readable(file: int, end: float) -> None:
    """Wait for input. Polls with a short timeout, because an interrupt of this thread is delivered between two waits.

    Parameters:
      end: The time on the monotonic clock at which to give up.

    Raises:
      TimeoutExpired: It is that time.
    """
    poll = select.poll()
    poll.register(file)
    while time.monotonic() <= end:
        if poll.poll(_PAUSE_MS):
            return
    raise subprocess.TimeoutExpired("git", TIMEOUT.total_seconds())


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
          RefDeletionUnavailable: When the root or its folder ``@hashed`` does not exist. If the disk is not mounted,
            which may leave an empty folder behind, every ref would look deleted.
        """
        if self._root is None:
            raise SettingsError(f"{_VARIABLE} is not set; it should be a folder such as /srv/git/repositories")
        if not (self._root / "@hashed").is_dir():
            raise RefDeletionUnavailable(
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
