"""Fixtures of the tests that drive real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Measured:
    """What a finished ``housekeeping run NAME --json`` said and took."""

    result: dict[str, Any]
    resident_mb: float


RunMeasured = Callable[..., Measured]


@pytest.fixture
def run_measured(environment: dict[str, str]) -> RunMeasured:
    """Run a worker by the command line, as a process of its own, and measure its resident memory at the peak."""

    def run(*arguments: str, **settings: str) -> Measured:
        command = [sys.executable, "-m", "housekeeping", "run", *arguments, "--json"]
        process = subprocess.Popen(
            command, env=environment | settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
        unit = 1024 * 1024 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, kilobytes elsewhere
        return Measured(json.loads(said), used.ru_maxrss / unit)

    return run
