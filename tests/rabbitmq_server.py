"""A RabbitMQ node of the tests' own, started with the first test that asks for one and gone with the last."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import quote

import pika
import pytest
from pika.exceptions import AMQPError

START_S: Final = 90.0
#: Below those that Linux and macOS give to connections.
_PORTS: Final = range(20_000, 32_000)
#: Debian's program on the PATH requires its own user; it calls this one.
_BEHIND_THE_WRAPPER: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


@pytest.fixture(scope="session")
def amqp_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of RabbitMQ: ``HOUSEKEEPING_TEST_AMQP_URL``, otherwise a node for this test session.

    The node is started with ``--broker=rabbitmq`` alone; without, the tests that need one are skipped. With
    ``--topology=rabbitmq-cluster`` there are three nodes, and a URL of each.
    """
    given = os.getenv("HOUSEKEEPING_TEST_AMQP_URL")
    if given:
        yield given
        return
    if request.config.getoption("broker") != "rabbitmq":
        # A node takes ten seconds to start, and all of a processor meanwhile.
        pytest.skip("RabbitMQ was not asked for: --broker=rabbitmq, or HOUSEKEEPING_TEST_AMQP_URL")
    program = shutil.which("rabbitmq-server")
    if program is None or shutil.which("epmd") is None:
        reason = "no rabbitmq-server found, and HOUSEKEEPING_TEST_AMQP_URL is not set"
        pytest.fail(reason)
    if request.config.getoption("topology") == "rabbitmq-cluster":
        with cluster(3) as nodes:
            yield ";".join(each.url for each in nodes)
        return
    with node(_BEHIND_THE_WRAPPER if _BEHIND_THE_WRAPPER.exists() else Path(program)) as running:
        yield running.url


class Node:
    """A running server, which can be killed and started again with what it has stored.

    Parameters:
      peer: A node whose cluster it is to `join`.

    Attributes:
      url: With the password of its only user.
      environment: By which RabbitMQ's own programs find it.
    """

    environment: dict[str, str]
    password: str

    def __init__(self, program: Path, folder: Path, peer: Node | None = None) -> None:
        self._program = program
        self._folder = folder
        self.port, distribution, epmd = free_ports(3)
        if peer is not None:
            epmd = int(peer.environment["ERL_EPMD_PORT"])
            shutil.copy2(peer._folder / ".erlang.cookie", folder)  # the secret by which nodes know each other
        self.password = password = secrets.token_hex(8) if peer is None else peer.password
        self.url = f"amqp://tests:{password}@127.0.0.1:{self.port}/{quote('/', safe='')}"
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\ndefault_user = tests\ndefault_pass = {password}\n"
            "log.file = false\nlog.console = true\nlog.console.level = warning\n"
        )
        (folder / "plugins").write_text("[].")
        (folder / "environment").touch()
        ours = {
            "NODENAME": f"tests-{self.port}@localhost",
            "NODE_PORT": str(self.port),
            "DIST_PORT": str(distribution),
            "MNESIA_BASE": str(folder / "mnesia"),
            "LOG_BASE": str(folder / "log"),
            "PID_FILE": str(folder / "pid"),
            "CONFIG_FILE": str(folder / "rabbitmq"),
            "CONF_ENV_FILE": str(folder / "environment"),
            "ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "ALLOW_INPUT": "1",  # the script then becomes the server, rather than to start it beside itself
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RABBITMQ_")}
        self.environment = kept | {f"RABBITMQ_{name}": value for name, value in ours.items()}
        # HOME is where Erlang keeps the secret by which nodes know each other.
        self.environment |= {"HOME": str(folder), "ERL_EPMD_PORT": str(epmd), "ERL_EPMD_ADDRESS": "127.0.0.1"}
        self._epmd = None if peer else self._spawn("epmd", "-port", str(epmd), "-address", "127.0.0.1")
        if self._epmd is not None:
            # A server without this daemon starts one, which outlives the server.
            self._wait_until(lambda: _listens(epmd), self._epmd)
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._server = self._spawn(str(self._program), "-noinput")
        # pika has much to say of each port that does not listen yet.
        self._wait_until(lambda: _listens(self.port) and self._answers(), self._server)

    @property
    def pid(self) -> int:
        """Its process, which has started."""
        assert self._server is not None
        return self._server.pid

    def join(self, peer: Node) -> None:
        """Become a node of the cluster of this one."""
        for command in (["stop_app"], ["join_cluster", peer.environment["RABBITMQ_NODENAME"]], ["start_app"]):
            done = self._spawn(str(self._program.with_name("rabbitmqctl")), *command)
            assert done.wait(START_S) == 0, (self._folder / "said").read_text(errors="replace")
        assert self._server is not None
        self._wait_until(lambda: _listens(self.port) and self._answers(), self._server)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def end(self) -> None:
        """End it and what belongs to it."""
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        # Should the tests be killed, it ends with them.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self._folder / "said").open("ab") as said:
            return subprocess.Popen(
                [*guard, *command],
                env=self.environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def _wait_until(self, holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S
        while not holds():
            said = (self._folder / "said").read_text(errors="replace")
            assert process.poll() is None, f"RabbitMQ did not start:\n{said}"
            assert time.monotonic() < deadline, f"RabbitMQ did not answer in time:\n{said}"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            pika.BlockingConnection(pika.URLParameters(self.url)).close()
        except (AMQPError, OSError):
            return False
        return True


@contextmanager
def node(program: Path = _BEHIND_THE_WRAPPER) -> Iterator[Node]:
    """A node that has answered, in a temporary folder; nothing of it is left after the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="hk-amqp-", ignore_cleanup_errors=True)))
        running = Node(program, folder)
        stack.callback(running.end)
        running.start()
        yield running


@contextmanager
def cluster(number: int, program: Path = _BEHIND_THE_WRAPPER) -> Iterator[list[Node]]:
    """Run a cluster of nodes."""
    with ExitStack() as stack:
        nodes: list[Node] = []
        for _ in range(number):
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="hk-amqp-", ignore_cleanup_errors=True)))
            each = Node(program, folder, nodes[0] if nodes else None)
            stack.callback(each.end)
            each.start()
            if nodes:
                each.join(nodes[0])
            nodes.append(each)
        yield nodes


def free_ports(count: int) -> list[int]:
    """Return free ports, chosen at random, so that parallel sessions choose different ones.

    They are outside of the range from which the system takes local ports: a server needs seconds until it listens, and
    meanwhile another connection could take its port.
    """
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = secrets.choice(_PORTS)
            try:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
        return found


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
