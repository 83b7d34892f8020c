"""Worker that is stopped while the Redis of its keys is unavailable (D8, R5)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from housekeeping import Settings
from tests.acceptance.processes import APPLICATION, WORKER, eventually, started
from tests.internals.brokers import message_broker
from tests.internals.embedded import embedded
from tests.rabbitmq_look import remove

#: An application's own module, whose actor runs until it is stopped.
TRIAL: Final = (
    APPLICATION
    + """
folder = Path(__file__).parent


@dramatiq.actor(
    idempotent=True, deduplicate="until_executed", deduplication={"if_deduplicated": "reschedule_once"}
)
def work():
    with (folder / "began").open("a") as began:
        began.write("x")
    while not (folder / "may_end").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    work.send()
    broker.close()
"""
)


@pytest.fixture
def broker_url(amqp_url: str) -> str:
    return amqp_url


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis) -> Iterator[Any]:
    """Return a broker that deletes the queues after the test."""
    broker: Any = message_broker(settings)
    broker.declare_queue("default", ensure=True)
    yield broker
    remove(broker)


def test_worker_that_cannot_release_a_key_stops_and_is_redelivered(
    broker: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    began, may_end = tmp_path / "began", tmp_path / "may_end"
    (tmp_path / "trial.py").write_text(TRIAL)
    command = [*WORKER, "trial", "-p", "1", "-t", "1", "--path", str(tmp_path), "--worker-shutdown-timeout", "2000"]
    with embedded.start(postgres=False) as servers:
        elsewhere = environment | {"HOUSEKEEPING_REDIS_URL": servers.redis_url, "HOUSEKEEPING_GRACE_S": "1"}
        subprocess.run([sys.executable, "trial.py"], cwd=tmp_path, env=elsewhere, check=True, timeout=60)
        with started(command, elsewhere, tmp_path / "first") as first:
            eventually(began.exists, first)
            servers.stop("redis")
            may_end.touch()
            eventually(lambda: first.said("End of a message could not be recorded; retrying"), first)

            assert first.terminate() == 0

    with started(command, environment, tmp_path / "second") as second:
        eventually(lambda: began.read_text() == "xx", second)
