"""Tests of F1 and F2: a paused worker, or one whose lease Redis lost, cannot commit after a takeover."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from tests.acceptance.processes import Process, eventually
from tests.chaos.conftest import MakeTrial
from tests.chaos.families import BUILDS, FIVE, FOUR, REFS, THREE, Family
from tests.chaos.figures import Figures
from tests.chaos.trial import PATIENCE_S, ServeTrial, Trial
from tests.chaos.verdicts import Undisturbed, drain, verdict


def broken_off(process: Process) -> set[str]:
    """Return the workers whose runs in this process were taken over."""
    return {line["worker"] for line in process.lines() if line.get("outcome") == "lost_lease"}


def ended(process: Process) -> set[str]:
    """Return the workers whose runs in this process have ended."""
    return {line["worker"] for line in process.lines() if line["event"] == "Run ended"}


def pause_until_taken_over(trial: Trial, sleeper: Process, figures: Figures) -> Process:
    """Pause a process until another one has done its work, then let both go on. Return the other one."""
    sleeper.pause()
    figures.faults["SIGSTOP past the ttl"] += 1
    other = trial.worker()
    eventually(lambda: not trial.waiting, other, patience_s=PATIENCE_S)
    trial.go()
    sleeper.unpause()
    return other


def empty_redis_until_taken_over(trial: Trial, one: Process, figures: Figures) -> Process:
    """Empty Redis until another process has started every worker again, then let both go on. Return the other one."""
    emptied_at = time.time()
    trial.servers.restart("redis")
    figures.faults["Redis restarted empty"] += 1
    eventually(lambda: not trial.tick(), one, patience_s=PATIENCE_S)
    other = trial.worker()
    eventually(
        lambda: all(trial.recorder.taken_over_at(family.actor, emptied_at) for family in trial.families),
        one,
        other,
        patience_s=PATIENCE_S,
    )
    trial.go()
    return other


@pytest.mark.parametrize("point", ["update", pytest.param("select", marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "families"), [(Trial, FIVE), (ServeTrial, THREE)], ids=["Redis", "PostgreSQL only"])
def test_worker_paused_past_its_ttl_cannot_commit_after_a_takeover(  # F1
    point: str,
    kind: type[Trial],
    families: Sequence[Family],
    make_trial: MakeTrial,
    undisturbed: Undisturbed,
    figures: Figures,
) -> None:
    trial = make_trial(families, kind)
    sleeper = trial.worker()
    trial.hold_first_round(point, 2, sleeper)

    other = pause_until_taken_over(trial, sleeper, figures)
    eventually(lambda: ended(sleeper) == {family.actor for family in families}, sleeper, patience_s=PATIENCE_S)
    drain(trial, sleeper, other, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == []
    assert broken_off(sleeper) == {family.actor for family in families}


def test_empty_redis_doubles_attempts_but_not_effects(  # F2
    make_trial: MakeTrial, undisturbed: Undisturbed, figures: Figures
) -> None:
    trial = make_trial(FOUR)
    one = trial.worker()
    trial.hold_first_round("select", 2, one)

    other = empty_redis_until_taken_over(trial, one, figures)
    drain(trial, one, other, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == []


@pytest.mark.long
def test_redis_frozen_past_the_ttl_ends_runs_and_loses_nothing(  # L2, L5
    make_trial: MakeTrial, undisturbed: Undisturbed, figures: Figures
) -> None:
    trial = make_trial(FIVE)
    worker = trial.worker()
    trial.hold_first_round("select", 2, worker)

    trial.redis.freeze()
    figures.faults["Redis silent past the ttl"] += 1
    eventually(lambda: not trial.keys("lease:*"), worker, patience_s=PATIENCE_S)
    trial.go()
    eventually(lambda: {REFS.actor, BUILDS.actor} <= ended(worker), worker, patience_s=PATIENCE_S)
    trial.redis.thaw()
    drain(trial, worker, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == []
    assert broken_off(worker) >= {REFS.actor, BUILDS.actor}
