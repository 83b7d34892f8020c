"""PostgreSQL in a temporary folder, on a unix socket."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from housekeeping.embedded.copies import runnable_postgres
from housekeeping.embedded.folders import create_inside
from housekeeping.embedded.processes import Account, kill_group, spawn, stop_all_in
from housekeeping.embedded.server import Server

_INITDB_SECONDS: Final = 120
_START_SECONDS: Final = 60
_SETTINGS: Final = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "cluster_name": "housekeeping-embedded",
    "max_connections": "200",
    "shared_buffers": "32MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # The data need not survive a crash of the machine.
    "fsync": "off",
    "full_page_writes": "off",
    # Shared memory in files of the data folder: /dev/shm would keep the segments of a killed server.
    "dynamic_shared_memory_type": "mmap",
}
# Lines of postmaster.pid.
_PID, _SHARED_MEMORY, _STATUS = 0, 6, 7
_IPC_RMID: Final = 0


class Postgres(Server):
    """PostgreSQL cluster with the superuser ``postgres`` without a password; data survives a restart."""

    title = "PostgreSQL"

    _initdb: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        create_inside(self._folder / "pg", self._account)
        create_inside(self._folder / "s", self._account)
        if self._account is not None:
            self._program = runnable_postgres(self._program, self._account, self._folder)
        command: list[str | Path] = [self._program.with_name("initdb"), "-D", data_folder(self._folder)]
        # C is the only collation that every machine has.
        command += ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._initdb = spawn(command, self._account, self._folder / "pg", self._log)

    def launch(self) -> None:
        if self._initdb is not None:
            self._await_initdb(self._initdb)
        settings = {**_SETTINGS, "unix_socket_directories": str(self._folder / "s")}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._spawn([self._program, "-D", data_folder(self._folder), *options], cwd=self._folder / "pg")

    def await_ready(self) -> None:
        self._await(self._ready, _START_SECONDS)

    def stop(self) -> None:
        if not self._signal_and_wait(signal.SIGINT):
            stop_all_in(self._folder / "pg")

    def kill(self) -> None:
        if self._process is not None and self.running:
            kill_group(self._process)
            # Each session has its own process group and would continue its statement.
            stop_all_in(self._folder / "pg", signal.SIGKILL)

    def discard(self) -> None:
        if self._initdb is not None:
            kill_group(self._initdb)
        ended = self._signal_and_wait(signal.SIGQUIT)
        # A killed server could not stop its sessions.
        if not ended or (self._process is not None and self._process.returncode < 0):
            stop_all_in(self._folder / "pg")
        release_shared_memory(self._folder, self._account)

    def _await_initdb(self, initdb: subprocess.Popen[bytes]) -> None:
        if not self._wait(lambda: initdb.poll() is not None, _INITDB_SECONDS):
            raise self._failure(f"could not be set up by initdb within {_INITDB_SECONDS} s")
        if initdb.returncode != 0:
            raise self._failure("could not be set up by initdb")

    def _ready(self) -> bool:
        # The same check as in pg_ctl. The file of a killed predecessor has another process id in its first line.
        lines = _postmaster_lines(self._folder)
        process = self._process
        return (
            process is not None
            and len(lines) > _STATUS
            and lines[_PID] == str(process.pid)
            and lines[_STATUS].strip() == "ready"
        )


def data_folder(folder: Path) -> Path:
    """Return the cluster's folder for the run in `folder`."""
    return folder / "pg" / "data"


def release_shared_memory(folder: Path, account: Account | None) -> None:
    """Release the System V shared memory segment that a killed PostgreSQL leaves outside of its folder."""
    lines = _postmaster_lines(folder)
    try:
        key, segment = (int(word) for word in lines[_SHARED_MEMORY].split())
    except (IndexError, ValueError):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # As the account that owned it, so that a segment with a reused number of another user is not removed.
    if account is not None:
        os.seteuid(account.uid)
    try:
        if libc.shmget(ctypes.c_int(key), ctypes.c_size_t(0), 0) == segment:
            libc.shmctl(segment, _IPC_RMID, None)
    finally:
        if account is not None:
            os.seteuid(0)


def _postmaster_lines(folder: Path) -> list[str]:
    try:
        return (data_folder(folder) / "postmaster.pid").read_text().splitlines()
    except OSError:
        return []
