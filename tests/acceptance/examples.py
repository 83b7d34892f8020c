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

from tests.acceptance.processes import WORKER, Process, eventually, started
from tests.internals.core import PREFIX
from tests.internals.embedded import embedded

EXAMPLES: Final = Path(__file__).parents[2] / "docs/examples"


@dataclass(frozen=True)
class Application:
    """Example application on a dedicated Redis.

    Attributes:
      namespace: That of the application's own broker.
    """

    module: str
    namespace: str
    environment: Mapping[str, str]
    client: redis.Redis

    @contextmanager
    def at_work(self, log: Path) -> Iterator[Process]:
        """Run the application's worker in a process."""
        command = [*WORKER, self.module, "--processes", "1", "--threads", "2", "--path", str(EXAMPLES)]
        with started(command, self.environment, log) as process:
            yield process

    def run(self, code: str, log: Path) -> None:
        """Run another process of the application until it ends."""
        text = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{code}"
        with started([sys.executable, "-W", "error", "-c", text], self.environment, log) as process:
            assert process.running.wait(60) == 0, process.text()

    def unfinished(self) -> int:
        """Return how many messages are queued, delayed or running.

        A message that waits until another delivery of its key ends is delayed. It is in no worker and not in the queue.
        """
        with self.client.pipeline(transaction=True) as pipeline:  # one moment: messages move between the two
            for queue in ("default", "default.DQ"):
                pipeline.hlen(f"{self.namespace}:{queue}.msgs")
            return sum(pipeline.execute())

    def wait_until_done(self, process: Process) -> None:
        """Wait until every message of the queue is processed."""
        eventually(lambda: not self.unfinished(), process)


def without_settings(environment: Mapping[str, str], **own_settings: Any) -> dict[str, str]:
    """Return the environment without the library's settings, except these."""
    kept = {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
    return kept | {name: str(value) for name, value in own_settings.items()}


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """Return a dedicated server: the applications' keys have no test prefix."""
    with embedded.start(postgres=False) as servers:
        yield servers.redis_url


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url, decode_responses=True)
    client.flushall()  # no other test uses it
    yield client
    client.close()
