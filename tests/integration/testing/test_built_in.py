"""Built-in sweeps pass the assertions of the test support (I4, F3)."""

from __future__ import annotations

import pytest
import redis

from housekeeping.testing.assertions import assert_idempotent, assert_survives_kill
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.ci_stuck_builds.models import Build
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.workers.bulk_imports.conftest import Tables
from tests.integration.workers.bulk_imports.conftest import tables as tables
from tests.integration.workers.ci_stuck_builds.conftest import add_builds as add_builds
from tests.integration.workers.ci_stuck_builds.conftest import bound as bound
from tests.integration.workers.ci_stuck_builds.conftest import builds as builds
from tests.integration.workers.ci_stuck_builds.tables import AddBuilds
from tests.internals.workers import drop_canceling
from tests.internals.workers import imports_sweep as stale_imports
from tests.internals.workers import status_sweep as user_statuses
from tests.session_settings import NEEDS_SESSION

pytestmark = NEEDS_SESSION

_DUE = "timestamptz '2026-01-01 00:00:00+00' + interval '1 minute' * (n - 3)"


@pytest.mark.slow
def test_user_statuses_are_idempotent_and_survive_kills(add_statuses: AddStatuses, clock: ManualClock) -> None:
    # I4, F3
    add_statuses(5, _DUE)
    sweep = changed(user_statuses, batch=2)

    assert_survives_kill(sweep, now=clock.now())
    assert_idempotent(sweep, now=clock.now())


@pytest.mark.slow
def test_imports_are_idempotent_and_survive_kills(tables: Tables, clock: ManualClock) -> None:
    # I4, F3
    tables.add_imports(3)
    tables.add_entities(3)
    tables.add_trackers("id FROM bulk_import_entities", "0, 1, 2")
    sweep = changed(stale_imports, batch=2, options={**stale_imports.options, "page_size": 2})

    assert_survives_kill(sweep, now=clock.now())
    assert_idempotent(sweep, now=clock.now())


@pytest.mark.slow
def test_builds_under_a_lease_are_idempotent_and_survive_kills(
    builds: type[Build], add_builds: AddBuilds, redis_client: redis.Redis, clock: ManualClock
) -> None:
    # I4, F3
    add_builds(3, "canceling", _DUE.replace("minute", "day"), "timestamptz '2025-12-30 00:00:00+00'")
    sweep = changed(drop_canceling, batch=2)

    assert_survives_kill(sweep, now=clock.now())
    assert_idempotent(sweep, now=clock.now())
