"""Tests of F4: lost connections to PostgreSQL do not change totals in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.acceptance.processes import eventually
from tests.chaos.conftest import MakeTrial
from tests.chaos.families import FIVE, THREE, Family
from tests.chaos.figures import Figures
from tests.chaos.trial import PATIENCE_S, ServeTrial, Trial
from tests.chaos.verdicts import Undisturbed, drain, verdict


def test_commit_with_a_lost_answer_is_counted_once(  # F4
    make_trial: MakeTrial, undisturbed: Undisturbed, figures: Figures
) -> None:
    trial = make_trial(FIVE)
    worker = trial.worker()
    trial.hold_first_round("cursor", 2, worker)

    trial.postgres.cut_commits(len(FIVE))
    trial.go()
    eventually(lambda: trial.postgres.commits_cut == len(FIVE), worker, patience_s=PATIENCE_S)
    figures.faults["connection cut after COMMIT was forwarded"] += trial.postgres.commits_cut
    drain(trial, worker, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == []


def terminate(trial: Trial) -> None:
    for pid in trial.backends():
        trial.place.rows("SELECT pg_terminate_backend(%s)", pid)


def restart(trial: Trial) -> None:
    trial.servers.restart("postgres")
    trial.reconnect()


def kill(trial: Trial) -> None:
    trial.servers.kill("postgres")
    trial.servers.start("postgres")
    trial.reconnect()


def cut(trial: Trial) -> None:
    trial.postgres.cut()


FAULTS: dict[str, Callable[[Trial], None]] = {
    "pg_terminate_backend of all": terminate,
    "PostgreSQL restarted": restart,
    "PostgreSQL killed": kill,
    "connections to PostgreSQL cut": cut,
}


@pytest.mark.parametrize(
    ("kind", "families"),
    [(Trial, FIVE), pytest.param(ServeTrial, THREE, marks=pytest.mark.long)],
    ids=["Redis", "PostgreSQL only"],
)
def test_postgresql_outage_loses_only_the_current_batch(
    kind: type[Trial], families: Sequence[Family], make_trial: MakeTrial, undisturbed: Undisturbed, figures: Figures
) -> None:
    trial = make_trial(families, kind)
    worker = trial.worker()
    for round, (name, fault) in enumerate(FAULTS.items(), 1):
        trial.arm("update", 2)
        trial.fill(round)
        trial.tick([round])
        trial.await_held(worker)
        fault(trial)
        figures.faults[name] += 1
        trial.go()
        drain(trial, worker, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == []
