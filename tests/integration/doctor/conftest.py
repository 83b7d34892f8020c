"""Fixtures of the doctor tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from housekeeping import Settings
from tests.internals.database import Database
from tests.internals.doctor import examine
from tests.internals.engine import Finding
from tests.internals.workers import BUILT_IN, configured_sweeps

#: Returns the doctor's findings of these levels.
Found = Callable[..., list[Finding]]


@pytest.fixture
def complete(settings: Settings, tmp_path: Path) -> Settings:
    """Return settings with all that the workers need, and with every family named, so that a misfit is an error."""
    (tmp_path / "repositories" / "@hashed").mkdir(parents=True)
    (tmp_path / "uploads").mkdir()
    given = settings.model_dump(exclude={"object_stores", "repositories_root", "built_in"})
    return Settings.load(
        **given,
        built_in="all",
        object_stores=f'{{"uploads": "file://{tmp_path}/uploads"}}',
        repositories_root=tmp_path / "repositories",
    )


@pytest.fixture
def tables(postgres: Database, redis_client: redis.Redis, complete: Settings) -> Iterator[None]:
    """Create all tables of the built-in workers, empty, with their indexes."""
    configured_sweeps(complete)
    postgres.create_tables([model for family in BUILT_IN for model in family.MODELS.values()])
    yield


@pytest.fixture
def found(complete: Settings, tables: None) -> Found:
    def look(*levels: str) -> list[Finding]:
        return [each for each in examine(complete, configured_sweeps(complete)) if each.level in levels]

    return look
