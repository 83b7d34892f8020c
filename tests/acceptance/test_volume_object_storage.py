"""A million pending uploads, a hundred thousand of them stale, a tenth of those with an object."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.acceptance.conftest import RunMeasured
from tests.internals.database import Database
from tests.internals.embedded import embedded
from tests.internals.workers import pending_entry

pytestmark = pytest.mark.slow

TOTAL = 1_000_000
STALE = 100_000
PER_FOLDER = 1_000
#: Entries as `prepare` writes them, created in the server.
PREPARE = """
for n = tonumber(ARGV[1]), ARGV[1] + ARGV[2] - 1 do
  local folder = math.floor(n / ARGV[3])
  redis.call("hset", KEYS[1], string.format("artifacts:%d/%d", folder, n % ARGV[3]), ARGV[4])
end
"""


@pytest.fixture
def own_redis() -> Iterator[str]:
    """Return a dedicated server: a real process uses the hash by its real name."""
    with embedded.start(postgres=False) as servers:
        yield servers.redis_url


def test_hundred_thousand_stale_uploads_are_removed_in_constant_memory(
    postgres: Database, own_redis: str, tmp_path: Path, run_measured: RunMeasured
) -> None:
    for folder in range(STALE // PER_FOLDER):
        (tmp_path / str(folder)).mkdir()
        for number in range(0, PER_FOLDER, 10):
            os.close(os.open(f"{tmp_path}/{folder}/{number}", os.O_CREAT))
    client: Any = redis.Redis.from_url(own_redis)
    for part in range(TOTAL // STALE):
        age = 20_000 if part == 0 else 60
        client.eval(PREPARE, 1, pending_entry.KEY, part * STALE, STALE, PER_FOLDER, int(time.time()) - age)
    client.hset(pending_entry.KEY, mapping={"artifacts:../poison": 1, "nowhere:poison": 1})

    run = run_measured(
        "object_storage.delete_stale_direct_uploads",
        HOUSEKEEPING_REDIS_URL=own_redis,
        HOUSEKEEPING_OBJECT_STORES=json.dumps({"artifacts": f"file://{tmp_path}"}),
    )

    assert run.result["outcome"] == "done"
    assert run.result["counts"] == {
        "total_pending_entries": TOTAL + 2,
        "total_deleted_stale_entries": STALE,
        "execution_timeout": False,
        "failed": 2,
    }
    assert client.hlen(pending_entry.KEY) == TOTAL - STALE + 2
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert run.resident_mb < 200
    client.close()
