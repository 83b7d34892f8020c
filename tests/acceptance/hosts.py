"""Several hosts on one machine: network namespaces on a bridge, and servers that listen on it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg2
import pytest
import redis

from tests.acceptance.processes import eventually
from tests.conftest import Urls
from tests.internals.embedded import (
    data_folder,
    find_postgres,
    find_redis,
    runnable_postgres,
    spawn,
    unprivileged_user,
)

_END_S: Final = 60


@dataclass(frozen=True)
class Host:
    """Network namespace with one cable to the bridge.

    Attributes:
      plug: The bridge's end of the cable.
    """

    name: str
    plug: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs a program on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def cut_off(self) -> None:
        """Disconnect the host: no packet arrives, and neither side is notified."""
        _ip("link", "set", self.plug, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self.plug, "up")


@dataclass(frozen=True)
class Network:
    """Bridge and its hosts.

    Attributes:
      address: The bridge's, where the servers are.
    """

    address: str
    hosts: list[Host]


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Create a bridge and hosts, and remove them after the block."""
    number = os.getpid()
    # Another run of the tests has another process id, so most likely other addresses.
    net = f"10.{200 + number % 50}.{number // 50 % 250}"
    bridge = f"hk{number}"
    with ExitStack() as stack:
        try:
            _ip("link", "add", bridge, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need root and iproute2: {error}")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        found = [_host(stack, bridge, f"{net}.{2 + place}/24", place) for place in range(hosts)]
        yield Network(f"{net}.1", found)


def _host(stack: ExitStack, bridge: str, address: str, place: int) -> Host:
    name, plug, socket_of_host = f"{bridge}-{place}", f"{bridge}-{place}", "eth0"
    try:
        _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    stack.callback(_ip, "netns", "del", name)
    _ip("link", "add", plug, "type", "veth", "peer", "name", socket_of_host, "netns", name)
    _ip("link", "set", plug, "master", bridge, "up")
    for words in (f"link set {socket_of_host} up", f"addr add {address} dev {socket_of_host}", "link set lo up"):
        _ip("-netns", name, *words.split())
    return Host(name, plug)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=_END_S)


@contextmanager
def servers(address: str) -> Iterator[Urls]:
    """Yield PostgreSQL and Redis that listen on the bridge's address."""
    folder = Path(tempfile.mkdtemp(prefix="housekeeping-hosts-", dir="/tmp"))
    user = unprivileged_user()
    data_folder(folder).parent.mkdir()
    for each in (folder, data_folder(folder).parent):
        if user is not None:
            os.chown(each, user.uid, user.gid)
    log, data, postgres, redis_server = folder / "log", data_folder(folder), find_postgres().path, find_redis().path
    if user is not None:
        # That user may not be able to read their folder, for example in a home directory.
        postgres = runnable_postgres(postgres, user, folder)

    def run(*command: str | Path) -> subprocess.Popen[bytes]:
        return spawn(list(command), None if command[0] == redis_server else user, folder, log)

    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        made = run(postgres.with_name("initdb"), "-D", data, "-U", "postgres", "-A", "trust", "--locale=C", "--no-sync")
        assert made.wait(_END_S) == 0, log.read_text()
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all samenet trust\n")
        database_port, redis_port = _free_port(address), _free_port(address)
        settings = {"listen_addresses": address, "port": database_port, "fsync": "off", "unix_socket_directories": ""}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        _ended_with(stack, run(postgres, "-D", data, *options), signal.SIGQUIT)
        _ended_with(
            stack,
            run(redis_server, "--bind", address, "--port", str(redis_port), "--protected-mode", "no", "--save", ""),
            signal.SIGTERM,
        )
        urls = Urls(f"postgresql://postgres@{address}:{database_port}/postgres", f"redis://{address}:{redis_port}/0")
        eventually(lambda: _answers(lambda: psycopg2.connect(urls.database).close()))
        with redis.Redis.from_url(urls.redis) as client:
            eventually(lambda: _answers(client.ping))
        yield urls


def _ended_with(stack: ExitStack, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    stack.callback(process.wait, _END_S)
    stack.callback(process.send_signal, number)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except (psycopg2.OperationalError, redis.RedisError):
        return False
    return True
