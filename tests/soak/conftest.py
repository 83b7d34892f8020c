"""Fixtures of the soak test. One soak serves all tests; ``--messages`` sets its length."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.processes import WORKER, started
from tests.internals.database import Database
from tests.soak.checkpoints import Checkpoint
from tests.twins import Twin

MESSAGES: Final = 20_000
THREADS: Final = 8
_TOP: Final = Path(__file__).parents[2]
_FOLDER: Final = Path(__file__).parent

#: Results by planted fault, because a soak takes minutes and all tests read the same one.
_soaks: Final[dict[str | None, Soaked]] = {}


@dataclass(frozen=True)
class Soaked:
    """Finished soak with its checkpoints and log. The last checkpoint is after short completions expired."""

    checkpoints: list[Checkpoint]
    said: list[dict[str, Any]]

    @property
    def last(self) -> Checkpoint:
        return self.checkpoints[-1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--messages", type=int, default=MESSAGES, help="how many messages a soak is")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out unless its path is given."""
    named = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(_FOLDER) for path in named) else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for soak in _soaks.values():
        terminalreporter.section("soak")
        for line in _table(soak.checkpoints):
            terminalreporter.write_line(line)


@pytest.fixture
def soaked(
    request: pytest.FixtureRequest, twin: Twin | None, environment: dict[str, str], postgres: Database, tmp_path: Path
) -> Soaked:
    """Run a soak with a real worker process of eight threads and a sender process."""
    name = twin.name if twin else None
    if name not in _soaks:
        postgres.create_tables([UserStatus])
        messages = request.config.getoption("--messages", MESSAGES)
        _soaks[name] = _soak(messages, environment, tmp_path)
    return _soaks[name]


def _soak(messages: int, environment: dict[str, str], folder: Path) -> Soaked:
    url, name = environment["HOUSEKEEPING_REDIS_URL"], environment["HOUSEKEEPING_NAMESPACE"]
    told = environment | {
        # Named connections can be distinguished from others on the same server.
        "HOUSEKEEPING_REDIS_URL": f"{url}{'&' if '?' in url else '?'}client_name={name}",
        "HOUSEKEEPING_LOG_LEVEL": "ERROR",
        # With Dramatiq's default of two per thread, the worker mostly waits for messages.
        "dramatiq_queue_prefetch": "100",
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_TOP)))),
    }
    command = [*WORKER, "tests.soak.application", "-p", "1", "-t", str(THREADS)]
    sender = [sys.executable, "-m", "tests.soak.sender", str(messages)]
    lines = folder / "checkpoints"
    with started(command, told, folder / "worker") as worker, lines.open("wb") as stream:
        sent = subprocess.run(
            sender, env=told, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.PIPE, text=True
        )
        assert sent.returncode == 0, f"{sent.stderr[-3000:]}\nthe worker said:\n{worker.text()[-3000:]}"
        said = worker.lines()
        assert worker.terminate() == 0
    return Soaked([Checkpoint.from_line(line) for line in lines.read_text().splitlines()], said)


_COLUMNS: Final = (
    "asked enqueued ended rate live dedup running done drained_done others "
    "worker_mb blocks threads files sender_mb blocks threads files connections"
).split()


def _table(checkpoints: list[Checkpoint]) -> list[str]:
    rows = [_COLUMNS, *(_row(each) for each in checkpoints)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _row(each: Checkpoint) -> list[str]:
    loaded, drained = each.loaded.number, each.drained.number
    numbers: list[float] = [
        each.asked,
        sum(each.enqueued.values()),
        sum(each.ended.values()),
        round(each.asked / each.seconds),
        each.live,
        loaded.get("dedup", 0),
        loaded.get("running", 0),
        sum(number for kind, number in loaded.items() if kind.startswith("done")),
        sum(number for kind, number in drained.items() if kind.startswith("done")),
        sum(number for kind, number in drained.items() if not kind.startswith("done")),
    ]
    for process in (each.worker, each.sender):
        numbers += [process.resident_mb, process.blocks, process.threads, process.descriptors]
    return [f"{number:.1f}" if isinstance(number, float) else str(number) for number in [*numbers, each.connections]]
