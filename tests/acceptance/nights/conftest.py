"""Fixtures of the questions of a night: servers, commands, and an installation in one state at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.nights.questions import Nights
from tests.acceptance.nights.shop import QUICK
from tests.command_processes import CommandProcesses
from tests.internals.embedded import embedded


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandProcesses]:
    """Processes whose heartbeats are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(QUICK), prepend=":")
        processes = CommandProcesses()
        yield processes
        processes.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[Any]:
    with embedded.start() as running:
        yield running


@pytest.fixture(scope="module")
def nights(servers: Any, commands: CommandProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    found = Nights(servers, commands, tmp_path_factory)
    yield found
    found.close()
