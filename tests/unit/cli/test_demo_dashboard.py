from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.internals.demo import dashboard


def test_demo_without_web_extra_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "housekeeping.web.application", None)
    stage: Any = None  # nothing of it is used

    with dashboard(stage, "token") as address:
        assert address.startswith("not installed: pip install ") and "[web]" in address
