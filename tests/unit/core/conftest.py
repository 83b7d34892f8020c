from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from tests.internals.core import logs

#: What was logged so far, each line read as JSON.
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, showwarning = root.handlers[:], root.level, warnings.showwarning
    yield
    root.handlers[:], warnings.showwarning = handlers, showwarning
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def lines(root_as_before: None, capsys: pytest.CaptureFixture[str]) -> Lines:
    logs.configure("INFO", "json")
    return lambda: [json.loads(line, parse_constant=_refuse) for line in capsys.readouterr().err.splitlines()]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
