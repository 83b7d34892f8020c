"""A real S3 server (SeaweedFS) from a wheel, which ends with the process that started it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.store import S3Store

BUCKET: Final = "uploads"
#: May do everything; may delete only what has ``/may/`` in its key.
ALL: Final = ("all-access", "all-secret-1234567")
SOME: Final = ("some-access", "some-secret-1234567")

_START_SECONDS: Final = 20
_POLL_SECONDS: Final = 0.02
_TRIES: Final = 3  # another process may take a free port before the server does
_PORTS: Final = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "admin.port",
    "admin.port.grpc",
)


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    endpoint: str
    process: subprocess.Popen[bytes]
    sockets: tuple[Path, ...]

    def options(self, access: tuple[str, str] = ALL) -> dict[str, str]:
        """The options of a location on this server."""
        return {
            "aws_access_key_id": access[0],
            "aws_secret_access_key": access[1],
            "aws_region": "us-east-1",
            "endpoint": self.endpoint,
        }

    def client(self) -> Any:
        own: Any = self.options()
        return S3Store(BUCKET, config=own, client_options={"allow_http": True})

    def kill(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for path in self.sockets:
            path.unlink(missing_ok=True)


def program() -> Path | None:
    """The server's program; None when its wheel is not installed."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    return Path(found) if found else None


def start(weed: Path, folder: Path) -> S3Server:
    """Start a server with one empty bucket.

    Raises:
      RuntimeError: When it does not come up; nothing is left running.
    """
    for number in range(_TRIES):
        place = folder / str(number)
        place.mkdir()
        server = _launch(weed, place)
        if _comes_up(server):
            return server
        server.kill()
    raise RuntimeError(f"the S3 server did not come up: {(place / 'log').read_text(errors='replace')[-2000:]}")


def _launch(weed: Path, place: Path) -> S3Server:
    may = {"all": ["Admin", "Read", "Write", "List"], "some": ["Read", "List", f"Write:{BUCKET}/*/may/*"]}
    keys = {"all": ALL, "some": SOME}
    identities = [
        {"name": name, "credentials": [{"accessKey": keys[name][0], "secretKey": keys[name][1]}], "actions": actions}
        for name, actions in may.items()
    ]
    (place / "identities.json").write_text(json.dumps({"identities": identities}))
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    options = {
        "dir": place,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "bucket": BUCKET,
        "s3.config": place / "identities.json",
        "s3.iam": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "webdav": "false",
        "admin.ui": "false",
        "master.telemetry": "false",  # it would call home
        "master.volumeSizeLimitMB": 64,
        "filer.localSocket": place / "filer.sock",
        "s3.localSocket": place / "s3.sock",
        **ports,
    }
    command = [str(weed), "mini", *(f"-{name}={value}" for name, value in options.items())]
    environment = {"PATH": os.defpath, "HOME": str(place), "TMPDIR": str(place)}
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
            preexec_fn=_die_with_parent,
        )
    # It makes these here whatever TMPDIR says, and a killed server does not take them along.
    sockets = tuple(
        Path(f"/tmp/seaweedfs-{name.removesuffix('.port.grpc')}-grpc-{port}.sock")
        for name, port in ports.items()
        if name.endswith(".grpc")
    )
    server = S3Server(f"http://127.0.0.1:{ports['s3.port']}", process, sockets)
    atexit.register(server.kill)
    return server


def _die_with_parent() -> None:
    # If the tests are killed, the server must end too.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _comes_up(server: S3Server) -> bool:
    client = server.client()
    deadline = time.monotonic() + _START_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        if _listens(server.endpoint):
            try:
                obstore.put(client, "first", b"")
                obstore.delete(client, "first")
                return True
            except Exception:
                pass
        time.sleep(_POLL_SECONDS)
    return False


def _listens(endpoint: str) -> bool:
    host, port = endpoint.removeprefix("http://").split(":")
    with socket.socket() as one:
        return one.connect_ex((host, int(port))) == 0


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
