"""Fixtures of the tests of partitions."""

from __future__ import annotations

import pytest

from tests.faults import Crash, at_step, crash
from tests.integration.sweeps.partitions import events
from tests.internals.database import Database
from tests.internals.sweeps import partition_catalog


@pytest.fixture
def postgres_14(postgres: Database) -> None:
    if postgres.server_version < 140000:
        pytest.skip("DETACH PARTITION ... CONCURRENTLY is new in PostgreSQL 14")


@pytest.fixture
def months(postgres: Database) -> None:
    """The partitioned table, without a DEFAULT partition, so that partitions are detached concurrently."""
    events.create()


@pytest.fixture
def killed(months: None) -> None:
    """The partitioned table, after a run that was killed when it had detached the first partition."""
    with pytest.raises(Crash), at_step(partition_catalog, "detach_concurrently", "after", crash):
        events.run(events.sweep())


@pytest.fixture(params=[False, True], ids=["concurrently", "with DEFAULT partition"])
def either_way(postgres: Database, request: pytest.FixtureRequest) -> None:
    """The partitioned table, whose partitions are detached concurrently or in a short transaction."""
    events.create(has_default=request.param)
