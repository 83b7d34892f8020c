"""A Redis server whose clock a test shifts: only the server's own calls for the time are changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import redis

from tests.internals.embedded import find_redis
from tests.rabbitmq_server import free_ports

_START_S = 20.0
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) { const char *by = getenv("TEST_REDIS_AHEAD_S"); return by ? atol(by) : 0; }

int clock_gettime(clockid_t id, struct timespec *at) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(id, at);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) at->tv_sec += shift();
    return answer;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int answer = real(at, zone);
    at->tv_sec += shift();
    return answer;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


@contextmanager
def shifted_redis(folder: Path, ahead: timedelta) -> Iterator[str]:
    """Start a server whose clock is so far ahead of the real one; yield its URL."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler, which a server with a shifted clock needs")
    source, library = folder / "shift.c", folder / "shift.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    (port,) = free_ports(1)
    server = subprocess.Popen(
        [find_redis().path, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
        env={**os.environ, "LD_PRELOAD": str(library), "TEST_REDIS_AHEAD_S": str(int(ahead.total_seconds()))},
        stdout=subprocess.DEVNULL,
    )
    try:
        _await(server, port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


def _await(server: subprocess.Popen[bytes], port: int) -> None:
    with redis.Redis(port=port) as client:
        deadline = time.monotonic() + _START_S
        while server.poll() is None and time.monotonic() < deadline:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.02)
    raise RuntimeError("the server with a shifted clock did not start")
