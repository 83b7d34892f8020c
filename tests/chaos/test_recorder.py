"""Tests of the recorder: closing the row of an aborted run is not a batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from housekeeping import Settings
from tests.chaos.conftest import MakeTrial
from tests.chaos.families import BUILDS
from tests.chaos.trial import Trial
from tests.internals.database import database
from tests.internals.ledger import runs, use_database

KEY = "ci/stuck_builds/drop_canceling"


@pytest.fixture
def trial(make_trial: MakeTrial) -> Iterator[Trial]:
    """Make a trial whose ledger this process writes."""
    made: Trial = make_trial([BUILDS])
    url, schema = made.environment["HOUSEKEEPING_DATABASE_URL"], made.own_schema
    use_database(Settings.load(database_url=url, schema_name=schema))
    yield made
    database.close()


def begun() -> runs.RunStart:
    attempt = runs.begin(BUILDS.actor, message_id=None, tick=None, trigger="cli", lease=(KEY, "another holder"))
    assert attempt is not None
    return attempt


@pytest.mark.parametrize("outcome", ["lost_lease", "failed", "partial"])
def test_run_aborted_before_its_first_batch_counts_no_batch(trial: Trial, outcome: runs.Outcome) -> None:
    early, late = begun(), begun()
    with database.atomic():
        runs.advance(late.run_id, {"failed": 0}, {"pass": "x", "after": [1]}, late.fence)

    runs.fail(early.run_id, outcome, "shutdown" if outcome == "partial" else "lease_lost", None, {"failed": 0})

    assert trial.recorder.complaints() == []


def test_batch_after_one_with_a_higher_epoch_is_reported(trial: Trial) -> None:
    early, late = begun(), begun()
    with database.atomic():
        runs.advance(late.run_id, {"failed": 0}, {"pass": "x", "after": [1]}, late.fence)

    with database.atomic():  # by a run that does not check its epoch
        runs.advance(early.run_id, {"failed": 0}, {"pass": "x", "after": [1]}, None)

    [complaint] = trial.recorder.complaints()
    assert early.fence is not None and late.fence is not None
    outdated = f"run {early.run_id} with epoch {early.fence.epoch} of {KEY} committed"
    assert f"{outdated} after epoch {late.fence.epoch}" in complaint
