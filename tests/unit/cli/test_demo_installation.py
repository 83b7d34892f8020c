from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.internals.core import HousekeepingError
from tests.internals.demo import DemoInstallation


@pytest.fixture
def installation(tmp_path: Path) -> DemoInstallation:
    servers: Any = SimpleNamespace(folder=tmp_path)
    settings: Any = None
    return DemoInstallation(servers, settings, {})


def test_ended_process_is_reported_with_its_last_log_line(installation: DemoInstallation) -> None:
    installation.log("worker").write_text("first\nhousekeeping: Redis did not answer\n")
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    ended.wait()

    with pytest.raises(
        HousekeepingError, match=r"^the worker process ended with 3: housekeeping: Redis did not answer$"
    ):
        installation.check({"worker": ended})
