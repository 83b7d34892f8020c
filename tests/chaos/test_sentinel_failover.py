"""Tests of F2 behind Sentinel: a failover that loses the last writes doubles attempts, but no effects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.acceptance.processes import Process, eventually
from tests.chaos.conftest import MakeTrial
from tests.chaos.families import FOUR
from tests.chaos.figures import Figures
from tests.chaos.trial import PATIENCE_S, Trial
from tests.chaos.verdicts import Undisturbed, drain, verdict
from tests.sentinel_servers import SentinelServers, applications_client, sentinel_servers

ROUNDS = 12


@dataclass(frozen=True)
class Behind:
    """Trial whose processes reach Redis through Sentinel."""

    trial: Trial
    servers: SentinelServers

    def keys(self, port: int) -> set[str]:
        with self.servers.client(port) as client:
            return {key.decode() for key in client.scan_iter(count=1000)}

    def fail_over(self, *processes: Process) -> set[str]:
        """Kill the primary, wait until the replica accepts messages, and return the keys that it lacked."""
        lost = self.keys(self.servers.first) - self.keys(self.servers.second)
        self.servers.kill(self.servers.first)
        eventually(lambda: not self.trial.tick(), *processes, patience_s=PATIENCE_S)
        return lost


@pytest.fixture
def behind(make_trial: MakeTrial) -> Iterator[Behind]:
    with sentinel_servers(password="s3cret") as servers:
        trial = make_trial(FOUR, settings={"REDIS_URL": servers.url})
        with applications_client(servers.url, socket_timeout=5) as client:
            trial.place.redis_client = client
            yield Behind(trial, servers)


def test_failover_that_loses_leases_doubles_attempts_but_not_effects(  # F2
    behind: Behind, undisturbed: Undisturbed, figures: Figures
) -> None:
    trial = behind.trial
    one = trial.worker()
    # The first connections.
    eventually(lambda: trial.keys("*heartbeat*"), one, patience_s=PATIENCE_S)
    trial.arm("select", 2)
    trial.fill(1)
    behind.servers.cut_replication()
    trial.tick()
    trial.await_held(one, ticking=True)

    trial.arm("select", 1)
    lost = behind.fail_over(one)
    figures.faults["Sentinel failover that lost leases"] += 1
    other = trial.worker()
    trial.await_held(one, other)
    trial.go()
    drain(trial, one, other, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == []
    assert any(":lease:" in key for key in lost)


def test_failover_under_load_repeats_no_effect(  # F2
    behind: Behind, undisturbed: Undisturbed, figures: Figures
) -> None:
    trial = behind.trial
    workers = [trial.worker(), trial.worker()]
    eventually(lambda: trial.keys("*heartbeat*"), *workers, patience_s=PATIENCE_S)
    for round in range(1, ROUNDS + 1):
        trial.fill(round)
        trial.tick([round])
        if round == ROUNDS // 2:
            behind.servers.cut_replication()
        if round == ROUNDS // 2 + 1:
            lost = behind.fail_over(*workers)
            figures.faults["Sentinel failover under load"] += 1
    drain(trial, *workers, expected=undisturbed)

    assert verdict(trial, undisturbed, figures) == []
    assert lost
