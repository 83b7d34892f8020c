from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any

import pytest
import structlog

from housekeeping.core.telemetry import logs
from housekeeping.core.telemetry.log_handler import StderrHandler
from tests.unit.core.conftest import Lines

NAME = "housekeeping.x"
HOSTILE = "\x1b[31m\r\nALARM \u202e \udc80 \"quoted\" {json} postgresql://me:hunter2@host/db password = 'a b'"
WRITER = """
import sys
from housekeeping.core.telemetry import logs
from housekeeping.core.telemetry.log_handler import StderrHandler
logs.configure("INFO", "json")
for _ in range(10):
    logs.log_rows("x", 20, "Said", [{"by": sys.argv[1], "number": number} for number in range(1000)])
"""


class _Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("no")


class _Status(IntEnum):
    STARTED = 1


class _Source(StrEnum):
    SECRET = "token=hunter2"


ROWS: list[dict[str, Any]] = [
    {"id": 1, "name": "plain"},
    {"id": 2, "name": HOSTILE, "tick": datetime(2026, 1, 1, tzinfo=UTC), "nothing": None, "yes": True},
    {"id": 2**80, "ratio": float("nan"), "part": 0.5, "amount": Decimal("1.10"), "raw": b"\x00"},
    {"refs": [HOSTILE, {HOSTILE: (1, HOSTILE)}], "status": _Status.STARTED, "source": _Source.SECRET},
    {"unshowable": _Unshowable(), "deep": [[[[[[[["token: hunter2"]]]]]]]]},
    {"worker": "mine", "level": "mine", "logger": "mine", "timestamp": "mine"},
    {"name": "n", "message": "m", "args": 1, "\x1b[31m\n": 1},
    {},
]


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_row_s_line_is_the_one_that_it_has_by_itself(
    root_as_before: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: logs.Format
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_767_225_600.25)
    logs.configure("INFO", form)

    with structlog.contextvars.bound_contextvars(worker="w", run_id=7, url=HOSTILE):
        logs.log_rows(NAME, logging.ERROR, HOSTILE, ROWS)
        together = capsys.readouterr().err
        for row in ROWS:
            logs.logger(NAME).error(HOSTILE, **row)
        by_themselves = capsys.readouterr().err

    assert together == by_themselves
    assert ("hunter2" in together, together.count("2026-01-01T00:00:00.250000Z")) == (False, len(ROWS))


class _Pieces:
    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, piece: str) -> None:
        self.written.append(piece)

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        return False


def test_rows_are_written_in_few_pieces_that_a_pipe_takes_whole(
    root_as_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = _Pieces()
    monkeypatch.setattr(sys, "stderr", stderr)
    logs.configure("INFO", "json")

    logs.log_rows(NAME, logging.INFO, "Said", [{"text": "x" * length} for length in range(1, 200)])

    assert len(stderr.written) == pytest.approx(sum(map(len, stderr.written)) / select.PIPE_BUF, rel=0.2)
    assert [piece for piece in stderr.written if len(piece) > select.PIPE_BUF or piece[-1] != "\n"] == []


@pytest.mark.parametrize(("beyond", "pieces"), [(-1, 1), (0, 1), (1, 2)])
def test_a_piece_is_as_long_as_a_pipe_takes_whole_line_ends_included(
    monkeypatch: pytest.MonkeyPatch, beyond: int, pieces: int
) -> None:
    stderr = _Pieces()
    monkeypatch.setattr(sys, "stderr", stderr)

    StderrHandler().write(["x" * 99, "é" * 50, "x" * (select.PIPE_BUF - 100 - 101 - 1 + beyond)])

    assert len(stderr.written) == pieces


def test_a_row_longer_than_a_pipe_takes_whole_is_a_piece_of_its_own(
    root_as_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = _Pieces()
    monkeypatch.setattr(sys, "stderr", stderr)
    logs.configure("INFO", "json")

    logs.log_rows(NAME, logging.INFO, "Said", [{"text": "x" * length} for length in (1, select.PIPE_BUF, 1)])

    assert [piece.count("\n") for piece in stderr.written] == [1, 1, 1]


def test_processes_that_share_a_pipe_do_not_tear_each_other_s_lines() -> None:
    reading, writing = os.pipe()
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, by], stderr=writing) for by in "ab"]
    os.close(writing)

    with open(reading) as pipe:
        text = pipe.read()

    assert [writer.wait(timeout=30) for writer in writers] == [0, 0]
    assert [line for line in text.splitlines() if line[:9] != '{"event":' or line[-2:] != '"}'] == []
    assert text.count("\n") == 20_000


def _another_handler(seen: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", seen.append)
    monkeypatch.setattr(logging.getLogger("housekeeping"), "handlers", [handler])


class _Seeing(logging.Filter):
    def __init__(self, seen: list[logging.LogRecord]) -> None:
        super().__init__()
        self._seen = seen

    def filter(self, record: logging.LogRecord) -> bool:
        self._seen.append(record)
        return True


def _a_filter(seen: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(NAME), "filters", [_Seeing(seen)])


def _a_filter_of_the_handler(seen: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger().handlers[0], "filters", [_Seeing(seen)])


def _a_function_in_the_place_of_logging_s(seen: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    original = logging.Logger.callHandlers

    def patched(logger: logging.Logger, record: logging.LogRecord) -> None:
        seen.append(record)
        original(logger, record)

    monkeypatch.setattr(logging.Logger, "callHandlers", patched)


def _a_factory_of_records(seen: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(*args: Any, **named: Any) -> logging.LogRecord:
        seen.append(logging.LogRecord(*args, **named))
        return seen[-1]

    monkeypatch.setattr(logging, "_logRecordFactory", factory)


@pytest.mark.parametrize(
    "somebody",
    [
        _another_handler,
        _a_filter,
        _a_filter_of_the_handler,
        _a_function_in_the_place_of_logging_s,
        _a_factory_of_records,
    ],
)
def test_whoever_looks_at_records_sees_one_for_each_row(
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    somebody: Callable[[list[logging.LogRecord], pytest.MonkeyPatch], None],
) -> None:
    logs.configure("INFO", "json")  # now, because pytest has added a handler of its own since the fixture did
    seen: list[logging.LogRecord] = []
    somebody(seen, monkeypatch)

    logs.log_rows(NAME, logging.ERROR, "Said", [{"id": 1}, {"id": 2}])

    assert [(record.getMessage(), vars(record)["id"]) for record in seen] == [("Said", 1), ("Said", 2)]
    assert [line["id"] for line in lines()] == [1, 2]


def test_below_the_level_no_row_is_written(lines: Lines) -> None:
    logs.configure("INFO", "json")

    logs.log_rows(NAME, logging.DEBUG, "Said", [{"id": 1}])

    assert lines() == []


def test_a_row_that_cannot_be_a_line_costs_no_other_its_own(lines: Lines) -> None:
    logs.configure("INFO", "json")

    logs.log_rows(NAME, logging.INFO, "Said", [{"id": 1}, {"id": 10**5000}, {"id": 3}])

    assert [(line["event"], line.get("id")) for line in lines()] == [
        ("Said", 1),
        ("A log line could not be written", None),
        ("Said", 3),
    ]


def test_in_an_application_with_logging_of_its_own_the_rows_arrive_as_extra(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        logs.log_rows(NAME, logging.INFO, "Said", [{"id": 1}, {"id": 2}])

    assert [(record.getMessage(), vars(record)["id"]) for record in caplog.records] == [("Said", 1), ("Said", 2)]
