"""Server processes: how they are started without root's rights, and how abandoned ones are found."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import signal
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from housekeeping.core.errors import EmbeddedServerError
from housekeeping.core.wording import how_to_install

#: Names of the processes that may be stopped in an abandoned folder.
_SERVER_NAMES: Final = frozenset({"initdb", "postgres", "redis-server", "valkey-server"})
_STOP_SECONDS: Final = 5
_POLL_SECONDS: Final = 0.02

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Account:
    """Unprivileged account of the servers, used if this process runs as root."""

    name: str
    uid: int
    gid: int

    def may_enter(self, folder: Path) -> bool:
        """Return whether the permissions of `folder` and all its parents let this account enter it."""
        return all(self._has_x(part.stat()) for part in (folder, *folder.parents))

    def _has_x(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return bool(status.st_mode & stat.S_IXUSR)
        return bool(status.st_mode & (stat.S_IXGRP if status.st_gid == self.gid else stat.S_IXOTH))


def unprivileged_account() -> Account | None:
    """Return the account for the servers: ``nobody`` if this is root, otherwise None for the current user.

    Raises:
      EmbeddedServerError: This is root, and the account ``nobody`` does not exist.
    """
    # PostgreSQL refuses to run as root, and as an account without a name.
    if os.geteuid() != 0:
        return None
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedServerError(
            "PostgreSQL refuses to run as root and this machine has no account 'nobody': run as an ordinary user"
        ) from None
    return Account(nobody.pw_name, nobody.pw_uid, nobody.pw_gid)


def identity_of(account: Account | None) -> dict[str, Any]:
    """Return the options of `subprocess.Popen` that run a program as this account."""
    return {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}


def spawn(command: list[str | Path], account: Account | None, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start `command` in `folder` as `account`, in its own process group, with its output in `log`.

    Raises:
      EmbeddedServerError: When the program cannot be run.
    """
    # A minimal environment: PGDATA, PGPORT, LANG and others are meant for other servers.
    environment = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    with log.open("ab") as output:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                umask=0o077,
                process_group=0,
                **identity_of(account),
            )
        except OSError as error:
            who = f" as '{account.name}'" if account else ""
            raise EmbeddedServerError(f"cannot run {command[0]}{who}: {error.strerror}") from error


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill `process` and its group, and wait until it is gone."""
    # Once it is reaped, its process id may be reused.
    if process.poll() is None:
        # macOS refuses a signal to a group whose last process has just ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def stop_all_in(folder: Path, postgres_signal: int = signal.SIGQUIT) -> bool:
    """Stop every server running in `folder`; return False if some could not be stopped or searched for.

    By default PostgreSQL ends immediately but releases its shared memory.
    """
    try:
        import psutil
    except ImportError:
        logger.warning(
            "Cannot look for servers left in %s: psutil is not installed: %s", folder, how_to_install("embedded")
        )
        return False

    def running() -> list[psutil.Process]:
        # Found by working folder and name, never by a process id written down earlier, because ids are reused.
        return [
            process
            for process in psutil.process_iter(["cwd", "name"])
            if process.info["name"] in _SERVER_NAMES and Path(process.info["cwd"] or "").is_relative_to(folder)
        ]

    # Do not wait for the processes themselves: in a container whose first process does not reap them they stay listed
    # for ever.
    for number in (postgres_signal, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_SECONDS
        while servers := running():
            for server in servers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    server.send_signal(number if server.info["name"] == "postgres" else signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    return not running()
