"""PostgreSQL and Redis in a temporary folder, each a process with a log that listens on a unix socket."""

from __future__ import annotations

import abc
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from housekeeping.core.errors import EmbeddedServerError
from housekeeping.embedded.folders import create_inside
from housekeeping.embedded.processes import Account, kill_group, spawn, stop_all_in
from housekeeping.embedded.programs import runnable_postgres, runnable_program

_INITDB_SECONDS: Final = 120
_STOP_SECONDS: Final = 10  # after that a server is killed
_POLL_SECONDS: Final = 0.01
_TAIL_LINES: Final = 6
# Lines of postmaster.pid.
_PID, _SHARED_MEMORY, _STATUS = 0, 6, 7
_IPC_RMID: Final = 0


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for the condition for at most this many seconds; return whether it became true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class Server(abc.ABC):
    """Server in a temporary folder that can be started and stopped repeatedly.

    Parameters:
      program: The executable.
      folder: The run's folder; the server creates its files there.
      account: The account it runs as; None for the current user.
      wait_for: Function called like `wait` while the server starts.
    """

    title: str
    start_seconds: int

    def __init__(
        self,
        program: Path,
        folder: Path,
        account: Account | None,
        wait_for: Callable[[Callable[[], bool], float], bool] = wait,
    ) -> None:
        self._program = program
        self._folder = folder
        self._account = account
        self._wait_for = wait_for
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / f"{type(self).__name__.lower()}.log"

    @abc.abstractmethod
    def create(self) -> None:
        """Create the server's files, possibly in the background; `launch` waits for it. Raises EmbeddedServerError."""

    @abc.abstractmethod
    def launch(self) -> None:
        """Start the process without waiting until it accepts connections."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Shut the server down cleanly; it can be started again."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill the server with all its processes, as SIGKILL does; it can be started again."""

    @abc.abstractmethod
    def discard(self) -> None:
        """End the server as fast as possible without leaving anything outside of its folder."""

    @abc.abstractmethod
    def _ready(self) -> bool:
        """Return whether the running server accepts connections."""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it accepts connections; do nothing if it is running.

        Raises:
          EmbeddedServerError: When it does not start; the text ends with the end of its log.
        """
        if not self.running:
            self.launch()
            self.await_ready()

    def await_ready(self) -> None:
        """Wait until the server accepts connections.

        Raises:
          EmbeddedServerError: When it ends or takes too long; it may still be running.
        """
        if not self._wait_for(lambda: not self.running or self._ready(), self.start_seconds):
            raise self._failure(f"did not accept connections within {self.start_seconds} s")
        if not self.running:
            raise self._failure("ended immediately")

    def _signal_and_wait(self, number: int) -> bool:
        if self._process is None or not self.running:
            return True
        self._process.send_signal(number)
        if wait(lambda: not self.running, _STOP_SECONDS):
            return True
        kill_group(self._process)
        return False

    def _failure(self, what: str) -> EmbeddedServerError:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
        return EmbeddedServerError(f"{self.title} {what}; its log ends: {' | '.join(lines) or '(empty)'}")


class Postgres(Server):
    """PostgreSQL cluster with the superuser ``postgres`` without a password; data survives a restart."""

    title = "PostgreSQL"
    start_seconds = 60
    settings: Mapping[str, str] = {
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
    _initdb: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        for part in ("pg", "s"):
            create_inside(self._folder / part, self._account)
        if self._account is not None:
            self._program = runnable_postgres(self._program, self._account, self._folder)
        command: list[str | Path] = [self._program.with_name("initdb"), "-D", data_folder(self._folder)]
        # C is the only collation that every machine has.
        command += ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._initdb = spawn(command, self._account, self._folder / "pg", self._log)

    def launch(self) -> None:
        initdb = self._initdb
        if initdb is not None:
            if not self._wait_for(lambda: initdb.poll() is not None, _INITDB_SECONDS):
                raise self._failure(f"could not be set up by initdb within {_INITDB_SECONDS} s")
            if initdb.returncode != 0:
                raise self._failure("could not be set up by initdb")
        command: list[str | Path] = [self._program, "-D", data_folder(self._folder)]
        for name, value in {**self.settings, "unix_socket_directories": self._folder / "s"}.items():
            command += ["-c", f"{name}={value}"]
        self._process = spawn(command, self._account, self._folder / "pg", self._log)

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

    def _ready(self) -> bool:
        # The same check as in pg_ctl. The file of a killed predecessor has another process id in its first line.
        lines = _postmaster_lines(self._folder)
        assert self._process is not None
        return len(lines) > _STATUS and (lines[_PID], lines[_STATUS].strip()) == (str(self._process.pid), "ready")


class Redis(Server):
    """Redis or Valkey without persistence; a restart empties it."""

    title = "Redis"
    start_seconds = 30

    def create(self) -> None:
        create_inside(self._folder / "r", self._account)
        if self._account is not None:
            self._program = runnable_program(self._program, self._account, self._folder)

    def launch(self) -> None:
        place = self._folder / "r"
        command: list[str | Path] = [self._program, "--port", "0", "--unixsocket", place / "redis.sock"]
        command += ["--unixsocketperm", "700", "--dir", place, "--save", "", "--appendonly", "no", "--daemonize", "no"]
        self._process = spawn([*command, "--maxmemory-policy", "noeviction"], self._account, place, self._log)

    def stop(self) -> None:
        self._signal_and_wait(signal.SIGTERM)

    def kill(self) -> None:
        if self._process is not None:
            kill_group(self._process)

    def discard(self) -> None:
        # It has no state outside of its folder, so there is no need for an orderly end.
        self.kill()

    def _ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            try:
                client.connect(str(self._folder / "r" / "redis.sock"))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False


def data_folder(folder: Path) -> Path:
    """Return the PostgreSQL cluster's folder for the run in `folder`."""
    return folder / "pg" / "data"


def release_shared_memory(folder: Path, account: Account | None) -> None:
    """Release the System V shared memory segment that a killed PostgreSQL leaves outside of its folder."""
    try:
        key, segment = (int(word) for word in _postmaster_lines(folder)[_SHARED_MEMORY].split())
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
