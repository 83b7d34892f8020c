"""Redis behind Sentinel: a primary, a replica and three Sentinels of the tests' own."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
import redis
from redis.connection import parse_url
from redis.sentinel import Sentinel

from tests.internals.core import is_sentinel_url, parse_sentinel_url
from tests.internals.embedded import find_redis
from tests.rabbitmq_server import free_ports

SERVICE: Final = "tests"
#: Redis-py before 8 sends no HELLO, whose answer says what a server is.
SAYS_WHAT_IT_IS: Final = pytest.mark.skipif(
    int(redis.__version__.partition(".")[0]) < 8, reason="this redis-py does not ask servers what they are"
)
#: Ports of the Sentinels that this process has started.
PORTS: Final = set[int]()
_START_S: Final = 20.0
_FAILOVER_S: Final = 60.0


def applications_client(url: str, **options: Any) -> redis.Redis:
    """Return a client that an application makes with redis-py alone."""
    if is_sentinel_url(url):
        parsed = parse_sentinel_url(url)
        login = {
            name: value for name, value in parse_url(parsed.server_url).items() if name in ("username", "password")
        }
        sentinel = Sentinel(parsed.sentinels, sentinel_kwargs=parsed.sentinel_login)
        client: redis.Redis = sentinel.master_for(parsed.service, **login, **options)
    else:
        client = redis.Redis.from_url(url, **options)
    return client


@dataclass(frozen=True)
class Encryption:
    """A program that can encrypt, and the certificate of all its servers, which is its own authority."""

    program: Path
    certificate: Path
    key: Path

    def lines(self) -> list[str]:
        """Return the configuration of a server."""
        files = (("cert", self.certificate), ("key", self.key), ("ca-cert", self.certificate))
        named = [f"tls-{name}-file {path}" for name, path in files]
        return [*named, "tls-replication yes", "tls-auth-clients no", "port 0"]


class SentinelServers:
    """Servers that can be killed, paused and started again.

    Parameters:
      down_after_ms: Time without an answer after which a Sentinel considers a server down.
      password: Of the data servers; that of the Sentinels is ``password`` and "-sentinel".
      tls: Program and certificate of servers that take encrypted connections only.
    """

    def __init__(
        self, folder: Path, down_after_ms: int = 1000, password: str = "", tls: Encryption | None = None
    ) -> None:
        self._folder = folder
        self._tls = tls
        self._password = password
        self._down_after_ms = down_after_ms
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.first, self.second, *self.sentinels = free_ports(5)
        PORTS.update(self.sentinels)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        login, own = (
            (f":{self._password}@", f"?sentinel_password={self._password}-sentinel") if self._password else ("",) * 2
        )
        if self._tls:
            own += f"{'&' if own else '?'}ssl_ca_certs={self._tls.certificate}"
        return f"{'rediss' if self._tls else 'redis'}+sentinel://{login}{hosts}/{SERVICE}/0{own}"

    @property
    def primary(self) -> int:
        """Port of the server that most Sentinels name."""
        told = [self._named(port) for port in self.sentinels if self._processes[port].poll() is None]
        return max(told, key=told.count)

    @property
    def direct_url(self) -> str:
        """URL of the current primary alone."""
        return f"redis://{f':{self._password}@' if self._password else ''}127.0.0.1:{self.primary}/0"

    def client(self, port: int) -> redis.Redis:
        """Return a client of one server."""
        sentinel = "-sentinel" if self._password and port in self.sentinels else ""
        tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": str(self._tls.certificate)} if self._tls else {}
        return redis.Redis(host="127.0.0.1", port=port, password=f"{self._password}{sentinel}" or None, **tls)

    def start(self) -> None:
        """Start all, and wait until a failover is possible."""
        self.start_server(self.first)
        self.start_server(self.second, replica_of=self.first)
        for port in self.sentinels:
            self.start_sentinel(port)
        self._await(self._is_complete, _START_S)

    def start_server(self, port: int, replica_of: int | None = None) -> None:
        """Start a data server, empty; Sentinel makes it a replica if it is no longer the primary."""
        options = [
            *(f"--{self._port}", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--repl-diskless-sync-delay", "0", "--maxmemory-policy", "noeviction"),
        ]
        for line in self._tls.lines() if self._tls else ():
            name, value = line.split()
            options += [f"--{name}", value]
        if self._password:
            options += ["--requirepass", self._password, "--masterauth", self._password]
        if replica_of is not None:
            options += ["--replicaof", "127.0.0.1", str(replica_of)]
        self._run(port, options)
        self._await(lambda: self._answers(port), _START_S)

    def kill(self, port: int) -> None:
        """End a server with SIGKILL."""
        self._processes[port].kill()
        self._processes[port].wait()

    def pause(self, port: int) -> None:
        """Stop a server without closing its connections, as if the network was cut."""
        self._processes[port].send_signal(signal.SIGSTOP)

    def resume(self, port: int) -> None:
        self._processes[port].send_signal(signal.SIGCONT)

    def cut_replication(self) -> None:
        """Keep the replica from receiving further writes. It needs the servers' password.

        Sentinel makes it the primary only if that happens within about ten times `down_after_ms`.
        """
        with self.client(self.second) as replica:
            replica.config_set("masterauth", "wrong")
            replica.execute_command("CLIENT", "KILL", "TYPE", "master")
            self._await(lambda: self._info(self.second)["master_link_status"] == "down", _START_S)

    def await_failover(self, old: int) -> int:
        """Wait until the Sentinels name another primary, and it accepts writes; return its port."""

        def done() -> bool:
            return self.primary != old and self._role(self.primary) == "master"

        self._await(done, _FAILOVER_S)
        return self.primary

    def await_complete(self) -> None:
        """Wait until there is a replica again."""
        self._await(self._is_complete, _FAILOVER_S)

    def await_replication(self) -> None:
        """Wait until the replica has all that was written before."""
        wanted = self._info(self.primary)["master_repl_offset"]
        self._await(lambda: self._info(self.primary).get("slave0", {}).get("offset", 0) >= wanted, _START_S)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()  # ends a paused one, too
        for process in self._processes.values():
            process.wait()

    def start_sentinel(self, port: int) -> None:
        """Start a Sentinel with its earlier state."""
        lines = [
            *(self._tls.lines() if self._tls else ()),
            f"{self._port} {port}",
            "bind 127.0.0.1",
            f"dir {self._folder}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.first} 2",
            f"sentinel down-after-milliseconds {SERVICE} {self._down_after_ms}",
            f"sentinel failover-timeout {SERVICE} 4000",
        ]
        if self._password:
            lines += [
                f"sentinel auth-pass {SERVICE} {self._password}",
                f"requirepass {self._password}-sentinel",
                f"sentinel sentinel-pass {self._password}-sentinel",
            ]
        configuration = self._folder / f"{port}.conf"
        if not configuration.exists():  # a Sentinel writes into it what it learns
            configuration.write_text("\n".join(lines) + "\n")
        self._run(port, [str(configuration), "--sentinel"])
        self._await(lambda: self._answers(port), _START_S)

    @property
    def _port(self) -> str:
        return "tls-port" if self._tls else "port"

    def _run(self, port: int, options: Sequence[str]) -> None:
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        with (folder / "log").open("ab") as log:
            self._processes[port] = subprocess.Popen(
                [self._tls.program if self._tls else find_redis().path, *options],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _is_complete(self) -> bool:
        others = [self._state(port)["num-other-sentinels"] for port in self.sentinels]
        usable = [self._knows_a_usable_replica(port) for port in self.sentinels]
        state = self._info(self.primary).get("slave0", {}).get("state")
        return others == [2, 2, 2] and all(usable) and state == "online"

    def _knows_a_usable_replica(self, sentinel: int) -> bool:
        with self.client(sentinel) as client:
            replicas: Any = client.sentinel_slaves(SERVICE)
        return any(not (each["is_sdown"] or each["is_disconnected"]) for each in replicas)

    def _named(self, sentinel: int) -> int:
        return int(self._state(sentinel)["port"])

    def _state(self, sentinel: int) -> dict[str, Any]:
        with self.client(sentinel) as client:
            state: dict[str, Any] = client.sentinel_master(SERVICE)
            return state

    def _info(self, port: int) -> dict[str, Any]:
        with self.client(port) as client:
            found: Any = client.info("replication")
            return dict(found)

    def _role(self, port: int) -> str:
        try:
            return str(self._info(port)["role"])
        except redis.RedisError:
            return ""

    def _answers(self, port: int) -> bool:
        try:
            with self.client(port) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in self._folder.glob("*/log"))
            assert time.monotonic() < deadline, f"it did not come true:\n{logs}"
            time.sleep(0.05)


@contextmanager
def sentinel_servers(
    down_after_ms: int = 1000, password: str = "", tls: Encryption | None = None
) -> Iterator[SentinelServers]:
    """Run the five servers until the block ends."""
    with TemporaryDirectory(prefix="hk-sentinel-", ignore_cleanup_errors=True) as folder:
        running = SentinelServers(Path(folder), down_after_ms, password, tls)
        try:
            running.start()
            yield running
        finally:
            running.close()
