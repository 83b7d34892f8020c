"""PgBouncer in transaction mode, between a contestant and its database."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from psycopg2.extensions import make_dsn, parse_dsn

from benchmarks.comparison import Contestant, Place
from housekeeping.embedded.server import identity_of, unprivileged_user

_PORT: Final = 16_432
_START_S: Final = 10.0


def through_pgbouncer(contestant: Contestant) -> Contestant:
    """Return the contestant with a pooler of its own, which ends with its process."""

    def ready(place: Place) -> Callable[[], object]:
        given = parse_dsn(place.database_url)
        configuration = place.folder / "pgbouncer.ini"
        configuration.write_text(
            f"[databases]\n* = {make_dsn(host=given['host'], user=given['user'])}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {_PORT}\nunix_socket_dir =\nauth_type = any\n"
            "pool_mode = transaction\ndefault_pool_size = 4\n"
        )
        user = unprivileged_user()
        if user is not None:
            os.chown(place.folder, user.uid, user.gid)
            os.chown(configuration, user.uid, user.gid)
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or "pgbouncer"
        process = subprocess.Popen(
            [program, str(configuration)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **identity_of(user)
        )
        atexit.register(process.kill)
        _await_port(process)
        url = f"postgresql://{given['user']}@127.0.0.1:{_PORT}/{given['dbname']}"
        return contestant(replace(place, database_url=url))

    return ready


def _await_port(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", _PORT)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("PgBouncer did not start")
        time.sleep(0.02)
