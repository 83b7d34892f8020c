"""The questions of a night, answered while a disk of PostgreSQL or that of Redis is full."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import redis

from tests.acceptance.nights.questions import (
    AT,
    LEASE,
    SAFE,
    SCHEDULE,
    STUCK,
    TICK,
    WORKER,
    Answer,
    State,
    each_answer_of,
)
from tests.acceptance.nights.shop import ORDERS, Night
from tests.acceptance.processes import eventually
from tests.internals.embedded import embedded, unprivileged_user


@dataclass(frozen=True)
class Servers:
    """Servers whose Redis and one tablespace are on a small disk."""

    database_url: str
    redis_url: str
    disk: Path

    def fill(self) -> None:
        with (self.disk / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space left"):
            while True:
                ballast.write(bytes(4096))

    def free(self) -> None:
        (self.disk / "ballast").unlink()


@contextmanager
def _small_disk() -> Iterator[Path]:
    """Yield a file system of a few MB, or skip the test where this process may not mount one."""
    folder = Path(tempfile.mkdtemp(prefix="night-", dir="/tmp"))
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=755", "night", str(folder)]
        done = subprocess.run(mount, capture_output=True, text=True) if shutil.which("mount") else None
        if done is None or done.returncode:
            pytest.skip(f"this process may not mount a file system: {done.stderr.strip() if done else 'no mount'}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    finally:
        folder.rmdir()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        disk = stack.enter_context(_small_disk())
        postgres = stack.enter_context(embedded.start(redis=False))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(disk))
            queues = stack.enter_context(embedded.start(postgres=False))
        place, user = disk / "tables", unprivileged_user()
        place.mkdir()
        if user is not None:
            os.chown(place, user.uid, user.gid)
        yield Servers(postgres.database_url, queues.redis_url, disk)


def _fill(shop: Night) -> None:
    """Fill the small disk until the end of the state."""
    shop.servers.fill()
    shop.stack.callback(shop.servers.free)


def _full_tablespace(shop: Night) -> None:
    worker, scheduler = shop.start_idle()
    shop.sql(
        f"CREATE TABLESPACE {shop.ledger} LOCATION '{shop.servers.disk}/tables'",
        "BEGIN",
        f"ALTER TABLE orders SET TABLESPACE {shop.ledger}",
        f"ALTER TABLE old_orders SET TABLESPACE {shop.ledger}",
    )
    shop.add_orders(300)
    # No run sees them before the archive can no longer take them.
    _fill(shop)
    shop.sql("COMMIT")
    shop.put(ORDERS)
    shop.status_says("No space", worker, scheduler)


def _full_redis(shop: Night) -> None:
    worker, scheduler = shop.start_idle()
    shop.add_orders(300)
    _fill(shop)
    with redis.Redis.from_url(shop.servers.redis_url) as client:
        client.config_set("save", "3600 1")
        # A snapshot of this does not fit the disk.
        client.set(f"{shop.settings.namespace}:large", os.urandom(100_000))
        client.bgsave()
        eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    shop.stack.callback(lambda: redis.Redis.from_url(shop.servers.redis_url).config_set("save", ""))
    shop.status_says("No space", worker, scheduler)


_NO_SPACE: Final = "could not extend file .*: No space left on device"

STATES: Final = (
    State(
        "a full disk of PostgreSQL",
        _full_tablespace,
        {
            STUCK: Answer(
                (
                    rf"^No space: PostgreSQL, database main, since {AT}, .* Free space on the server's disk",
                    rf"ALERT disk full: {_NO_SPACE}; 1 worker cannot write: {ORDERS} \(no_space\)",
                ),
                (
                    rf"No space: PostgreSQL, database main, since {AT}, .* Free space on the server's disk",
                    rf"disk full: {_NO_SPACE}; 1 worker cannot write: {ORDERS}",
                ),
                ("All right", "did not answer"),
            ),
            SAFE: Answer(
                (f"its last run failed: disk full: {_NO_SPACE}",), (f"its last run failed: disk full: {_NO_SPACE}",)
            ),
        },
    ),
    State(
        "a full disk of Redis",
        _full_redis,
        {
            STUCK: Answer(
                (
                    rf"^No space: Redis, since {AT}, .* Free space on the server's disk",
                    "UNAVAILABLE Redis is full: MISCONF .*; not shown: queues, processes, leases",
                ),
                (rf"No space: Redis, since {AT}, .* Free space on the server's disk", "Redis is full: MISCONF"),
                ("All right", "did not answer", "No worker", "No scheduler", r"dead\?"),
            ),
            SAFE: Answer(
                ("a run now would wait", "Redis is full: MISCONF", "whether a scheduler is alive is unknown"),
                ("would wait", "Redis is full: MISCONF"),
                ("would start",),
            ),
            TICK: Answer(
                ("Redis is full: MISCONF", "No run can be sent or received"),
                ("Redis is full: MISCONF", "No run can be sent or received"),
                type=(f"why {ORDERS}",),
                look=("/", WORKER, f"{WORKER}/plan"),
            ),
            LEASE: Answer(
                ("Redis is full: MISCONF .*; showing the leases that the database knows",),
                ("Redis is unavailable; these are the leases of open runs in the database",),
                ("no leases are held",),
            ),
            SCHEDULE: Answer(
                ("no heartbeat can be written",),
                ("no heartbeat can be written",),
                ("[Nn]o scheduler", "scheduler +dead"),
            ),
        },
    ),
)

test_answer_is_right_in_three_steps = each_answer_of(*STATES)
