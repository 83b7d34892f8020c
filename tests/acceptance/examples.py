"""Example applications of docs/examples, started as their users would start them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from housekeeping import embedded
from housekeeping.core.settings import PREFIX
from tests.acceptance.processes import WORKER, Process, eventually, started

EXAMPLES: Final = Path(__file__).parents[2] / "docs/examples"


@dataclass(frozen=True)
class Application:
    """One of them, on a Redis of its own.

    Attributes:
      namespace: That of the application's own broker.
    """

    module: str
    namespace: str
    environment: Mapping[str, str]
    client: redis.Redis

    @contextmanager
    def at_work(self, log: Path) -> Iterator[Process]:
        """Its worker, as a process of its own."""
        command = [*WORKER, self.module, "--processes", "1", "--threads", "2", "--path", str(EXAMPLES)]
        with started(command, self.environment, log) as process:
            yield process

    def run(self, code: str, log: Path) -> None:
        """Another process of it, to its end."""
        text = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{code}"
        with started([sys.executable, "-W", "error", "-c", text], self.environment, log) as process:
            assert process.running.wait(60) == 0, process.text()

    def wait_until_done(self, process: Process) -> None:
        """Return when every message of the queue has been dealt with."""
        eventually(lambda: not self.client.hlen(f"{self.namespace}:default.msgs"), process)


def without_settings(environment: Mapping[str, str], **ours: Any) -> dict[str, str]:
    """The environment without a setting of the library, but these."""
    kept = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
    return kept | {name: str(value) for name, value in ours.items()}


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A server of their own: the applications' keys are not under a prefix of a test's."""
    with embedded.start(postgres=False) as servers:
        yield servers.redis_url


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url, decode_responses=True)
    client.flushall()  # it is nobody else's
    yield client
    client.close()
