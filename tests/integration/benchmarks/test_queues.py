"""Every queue that the benchmark compares processes all messages, and those that are not installed are left out."""

from __future__ import annotations

import sys
from typing import Final

import pytest
from click.testing import CliRunner

from benchmarks import queues
from benchmarks.queue_programs import PROGRAMS
from benchmarks.servers import Stage, started

pytestmark = pytest.mark.slow

_MESSAGES: Final = 100
#: What the tests' environment has. The others need another release of redis-py.
_HERE: Final = [name for name, (package, _) in PROGRAMS.items() if package in ("dramatiq", "celery")]


def test_every_queue_processes_all_messages() -> None:
    with started(durable=False) as servers:
        sent, processed = queues.compare(Stage(servers), dict.fromkeys(_HERE, sys.executable), _MESSAGES, 1)

    assert {name: turn.done for name, (turn,) in sent.turns.items()} == dict.fromkeys(_HERE, _MESSAGES)
    # The first one starts the clock.
    assert {name: turn.done for name, (turn,) in processed.turns.items()} == dict.fromkeys(_HERE, _MESSAGES - 1)
    assert all(turn.cost.redis_commands > 0 for (turn,) in [*sent.turns.values(), *processed.turns.values()])


def test_missing_queue_is_left_out_with_the_way_to_install_it() -> None:
    done = CliRunner().invoke(queues.main, ["--contestant", "bare dramatiq", "--contestant", "arq", "--rounds", "1"])

    assert done.exit_code == 0, done.output
    assert "arq" in done.stderr and "-m venv queues && queues/bin/pip install -r" in done.stderr
    assert "left out" in done.stderr
