"""Log lines: their fields, what no value can break, and rows that are logged together."""

from __future__ import annotations

import itertools
import logging
import os
import re
import select
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any

import pytest
import structlog

from tests.internals.core import StderrHandler, logs, mask_secrets
from tests.unit.core.conftest import Lines


class _Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_line_has_the_fields_that_monitoring_reads(lines: Lines) -> None:
    with structlog.contextvars.bound_contextvars(worker="w", message_id="m", run_id=7):
        logs.logger("housekeeping.x").info("Run ended", deleted_rows=3, tick=datetime(2026, 1, 1, tzinfo=UTC))

    (line,) = lines()
    at = datetime.fromisoformat(line.pop("timestamp"))
    assert at.utcoffset() == UTC.utcoffset(None)
    assert line == {
        "event": "Run ended",
        "level": "info",
        "logger": "housekeeping.x",
        "worker": "w",
        "message_id": "m",
        "run_id": 7,
        "deleted_rows": 3,
        "tick": "2026-01-01T00:00:00+00:00",
    }


def test_lines_of_other_libraries_have_them_too(lines: Lines) -> None:
    with structlog.contextvars.bound_contextvars(message_id="m"):
        logging.getLogger("dramatiq.worker").info("Took %s", "it")

    (line,) = lines()
    assert (line["event"], line["level"], line["logger"]) == ("Took it", "info", "dramatiq.worker")
    assert (line["message_id"], "timestamp" in line) == ("m", True)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("two\nlines\r\x00", "two\nlines\r\x00"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ({(1, 2): {b"x"}}, {"(1, 2)": ["b'x'"]}),
        (_Unshowable(), "<_Unshowable that cannot be shown>"),
        ("\udc80", "\udc80"),
        (10**400, 10**400),
        (ValueError("redis://:hunter2@host"), "redis://:***@host"),
        ({"urls": ["postgresql://me:hunter2@host/db"]}, {"urls": ["postgresql://me:***@host/db"]}),
    ],
)
def test_any_value_makes_one_line_of_json(lines: Lines, value: Any, shown: Any) -> None:
    logs.logger("x").info("any", value=value)

    (line,) = lines()
    assert line["value"] == shown


@pytest.mark.parametrize(
    "text", ["api_key=x", "secret :x", '{"password":"x"}', "redis://:x@host", "TOKEN = 'x y'", "signature\n=\nx"]
)
def test_every_secret_has_a_character_that_triggers_the_search(text: str) -> None:
    assert logs.to_log_value(text) == mask_secrets(text) != text


def test_self_referencing_value_is_logged_as_one_line(lines: Lines) -> None:
    value: dict[str, Any] = {}
    value["itself"] = value

    logs.logger("x").info("any", value=value)

    assert len(lines()) == 1


def test_an_exception_is_one_line_without_its_passwords(lines: Lines) -> None:
    try:
        raise ValueError("postgresql://me:hunter2@host/db\nsecond line")
    except ValueError:
        logs.logger("x").exception("Failed")

    (line,) = lines()
    assert line["exception"].endswith("ValueError: postgresql://me:***@host/db\nsecond line")
    assert "hunter2" not in line["exception"]


def test_callers_field_does_not_replace_the_lines_own(lines: Lines) -> None:
    mine = {"event": "mine", "level": "mine", "logger": "mine", "timestamp": "mine", "other": "mine"}
    logging.getLogger("theirs").warning("Said", extra=mine)

    (line,) = lines()
    assert (line["event"], line["level"], line["logger"], line["other"]) == ("Said", "warning", "theirs", "mine")
    assert line["timestamp"] != "mine"


def test_field_named_like_a_record_attribute_is_renamed(lines: Lines) -> None:
    logs.logger("x").info("Said", name="n", message="m", args=1)

    (line,) = lines()
    assert (line["name_"], line["message_"], line["args_"]) == ("n", "m", 1)


def test_line_whose_arguments_do_not_fit_is_logged_as_an_error(lines: Lines) -> None:
    ill_formed = logging.LogRecord("theirs", logging.INFO, __file__, 1, "%d rows", ("many",), None)

    # To our handler alone: pytest's own makes it an error.
    logging.getLogger().handlers[0].handle(ill_formed)

    (line,) = lines()
    assert (line["event"], line["of"], line["line"]) == ("A log line could not be written", "theirs", "%d rows")


class _Unsayable:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_message_that_cannot_be_converted_is_logged_as_an_error(lines: Lines) -> None:
    unsayable = logging.LogRecord("theirs", logging.INFO, __file__, 1, _Unsayable(), (), None)

    logging.getLogger().handlers[0].handle(unsayable)

    (line,) = lines()
    assert (line["event"], line["line"]) == ("A log line could not be written", "<_Unsayable>")


def test_warnings_are_lines_too(lines: Lines) -> None:
    warnings.simplefilter("always")

    warnings.warn("outdated", stacklevel=1)

    (line,) = lines()
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")


def test_skipped_message_is_logged_at_info(lines: Lines) -> None:
    # L4: Dramatiq's own line for it is one.
    dramatiq = logging.getLogger("dramatiq.worker.WorkerThread")

    dramatiq.warning("Message %s was skipped.", "sweep()")
    dramatiq.warning("Something else")

    assert [(line["event"], line["level"]) for line in lines()] == [
        ("Message sweep() was skipped.", "info"),
        ("Something else", "warning"),
    ]


#: A module of a library, whose function logs the error of what it calls.
_WORKER = """
def process(actor, log):
    try:
        actor()
    except Exception:
        log.error("Failed", exc_info=True)
"""


@pytest.mark.parametrize(("module", "functions"), [("dramatiq.worker", ["actor"]), ("app", ["process", "actor"])])
def test_traceback_of_a_failed_message_begins_below_the_worker(lines: Lines, module: str, functions: list[str]) -> None:
    worker: dict[str, Any] = {"__name__": module}
    exec(_WORKER, worker)

    def actor() -> None:
        raise RuntimeError("as intended")

    worker["process"](actor, logging.getLogger("dramatiq.worker.WorkerThread"))

    (line,) = lines()
    assert re.findall(r"line \d+, in (?:\S+\.)?(\w+)", line["exception"]) == functions


def test_readable_lines_mask_passwords_in_tracebacks_too(
    root_as_before: None, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("INFO", "console")
    try:
        raise ValueError("postgresql://me:hunter2@host/db")
    except ValueError:
        logs.logger("x").exception("Failed", url="redis://:hunter2@host")

    shown = capsys.readouterr().err
    assert "hunter2" not in shown
    assert re.search(r"\[error +\] Failed +\[x\] url=redis://:\*\*\*@host\nTraceback", shown)


@contextmanager
def _stderr_that_nobody_reads() -> Iterator[None]:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as stderr, redirect_stderr(stderr):
        yield
        # The rest of its buffer would fail again when it is closed.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), writing)


def test_line_that_stderr_rejects_raises_nothing(root_as_before: None) -> None:
    with _stderr_that_nobody_reads():
        logs.configure("INFO", "json")

        logs.logger("x").info("Said")
        logs.log_rows("x", logging.INFO, "Said", [{"id": 1}])


def test_fields_arrive_as_extra_in_an_application_with_its_own_logging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        logs.logger("x").info("Said", rows=3)

    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["rows"]) == ("Said", 3)


NAME = "housekeeping.x"
HOSTILE = "\x1b[31m\r\nALERT \u202e \udc80 \"quoted\" {json} postgresql://me:hunter2@host/db password = 'a b'"
WRITER = """
import sys
from housekeeping.core import logs
from housekeeping.core.logs import StderrHandler
logs.configure("INFO", "json")
for _ in range(10):
    logs.log_rows("x", 20, "Row changed", [{"by": sys.argv[1], "number": number} for number in range(1000)])
"""


class _Status(IntEnum):
    STARTED = 1


class _Source(StrEnum):
    SECRET = "token=hunter2"


ROWS: list[dict[str, Any]] = [
    {"id": 1, "name": "plain"},
    {"id": 2, "name": HOSTILE, "tick": datetime(2026, 1, 1, tzinfo=UTC), "nothing": None, "yes": True},
    {"id": 2**80, "ratio": float("nan"), "part": 0.5, "amount": Decimal("1.10"), "raw": b"\x00"},
    {"refs": [HOSTILE, {HOSTILE: (1, HOSTILE)}], "status": _Status.STARTED, "source": _Source.SECRET},
    {"unshowable": _Unsayable(), "deep": [[[[[[[["token: hunter2"]]]]]]]]},
    {"worker": "mine", "level": "mine", "logger": "mine", "timestamp": "mine"},
    {"name": "n", "message": "m", "args": 1, "\x1b[31m\n": 1},
    {},
]
#: Rows with the same names, which are formatted together.
ALIKE: list[dict[str, Any]] = [
    {
        "100 %s \n": value,
        "path": f"a/{number}",
        "of": "all",
        "secret": f"token={number}hunter2",
        "worker": number,
        "level": number,
        "args": value,
        "size": size,
    }
    for number, (value, size) in enumerate(itertools.product((v for row in ROWS for v in row.values()), (1, True)))
]


@pytest.mark.parametrize("rows", [ROWS, ALIKE, [*ALIKE, *ROWS, *ALIKE[:1]], [{"id": 1, "level": "mine"}] * 3])
@pytest.mark.parametrize("form", ["json", "console"])
def test_log_rows_writes_the_same_lines_as_a_logger(
    root_as_before: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    form: logs.Format,
    rows: list[dict[str, Any]],
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_767_225_600.25)
    monkeypatch.setattr("time.time_ns", lambda: 1_767_225_600_250_000_000)  # which logging reads since Python 3.13
    logs.configure("INFO", form)

    with structlog.contextvars.bound_contextvars(worker="w", run_id=7, url=HOSTILE):
        logs.log_rows(NAME, logging.INFO, HOSTILE, rows)
        written_at_once = capsys.readouterr().err
        for row in rows:
            logs.logger(NAME).info(HOSTILE, **row)
        written_one_by_one = capsys.readouterr().err

    assert written_at_once == written_one_by_one
    assert ("hunter2" in written_at_once, written_at_once.count("2026-01-01T00:00:00.250000Z")) == (False, len(rows))


class _Chunks:
    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, chunk: str) -> None:
        self.written.append(chunk)

    def flush(self) -> None:
        """Nothing is buffered."""

    def isatty(self) -> bool:
        return False


def test_rows_are_written_in_few_chunks_of_at_most_pipe_buf(root_as_before: None) -> None:
    stderr: Any = _Chunks()
    with redirect_stderr(stderr):
        logs.configure("INFO", "json")
        logs.log_rows(NAME, logging.INFO, "Row changed", [{"100 %": "x" * length} for length in range(1, 200)])

    assert len(stderr.written) == pytest.approx(sum(map(len, stderr.written)) / select.PIPE_BUF, rel=0.2)
    assert [chunk for chunk in stderr.written if len(chunk) > select.PIPE_BUF or chunk[-1] != "\n"] == []


@pytest.mark.parametrize(("beyond", "chunks"), [(-1, 1), (0, 1), (1, 2)])
def test_a_chunk_has_at_most_pipe_buf_bytes_with_its_line_ends(beyond: int, chunks: int) -> None:
    stderr: Any = _Chunks()
    with redirect_stderr(stderr):
        StderrHandler().write(["x" * 99, "é" * 50, "x" * (select.PIPE_BUF - 100 - 101 - 1 + beyond)])

    assert len(stderr.written) == chunks


def test_a_row_longer_than_pipe_buf_is_a_chunk_of_its_own(root_as_before: None) -> None:
    stderr: Any = _Chunks()
    with redirect_stderr(stderr):
        logs.configure("INFO", "json")
        logs.log_rows(NAME, logging.INFO, "Row changed", [{"text": "x" * length} for length in (1, select.PIPE_BUF, 1)])

    assert [chunk.count("\n") for chunk in stderr.written] == [1, 1, 1]


def test_processes_that_share_a_pipe_do_not_split_each_others_lines() -> None:
    reading, writing = os.pipe()
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, by], stderr=writing) for by in "ab"]
    os.close(writing)

    with open(reading) as pipe:
        text = pipe.read()

    assert [writer.wait(timeout=30) for writer in writers] == [0, 0]
    assert [line for line in text.splitlines() if line[:9] != '{"event":' or line[-2:] != '"}'] == []
    assert text.count("\n") == 20_000


class _RecordingHandler(logging.Handler):
    def __init__(self, seen: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        self._seen(record)


class _RecordingFilter(logging.Filter):
    def __init__(self, seen: list[logging.LogRecord]) -> None:
        super().__init__()
        self._seen = seen

    def filter(self, record: logging.LogRecord) -> bool:
        self._seen.append(record)
        return True


@contextmanager
def _handled(name: str, seen: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    """Call a function with each record of the logger."""
    logger, handler = logging.getLogger(name), _RecordingHandler(seen)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@contextmanager
def _filtered(filtered: logging.Filterer, by: Any) -> Iterator[None]:
    """Add this filter to a logger or handler."""
    filtered.addFilter(by)
    yield
    filtered.removeFilter(by)


def _second_handler(seen: list[logging.LogRecord]) -> AbstractContextManager[None]:
    return _handled("housekeeping", seen.append)


def _logger_filter(seen: list[logging.LogRecord]) -> AbstractContextManager[None]:
    return _filtered(logging.getLogger(NAME), _RecordingFilter(seen))


def _handler_filter(seen: list[logging.LogRecord]) -> AbstractContextManager[None]:
    return _filtered(logging.getLogger().handlers[0], _RecordingFilter(seen))


@contextmanager
def _replaced_logger_method(seen: list[logging.LogRecord]) -> Iterator[None]:
    original = logging.Logger.callHandlers

    def patched(logger: logging.Logger, record: logging.LogRecord) -> None:
        seen.append(record)
        original(logger, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.Logger, "callHandlers", patched)
        yield


@pytest.mark.parametrize(
    ("observe", "level"),
    [
        (_second_handler, logging.INFO),
        (_logger_filter, logging.INFO),
        (_handler_filter, logging.INFO),
        (_second_handler, logging.ERROR),
        (_replaced_logger_method, logging.INFO),  # as Sentry's client does
        (_replaced_logger_method, logging.ERROR),
    ],
)
def test_observers_of_records_see_one_record_for_each_row(
    lines: Lines,
    observe: Callable[[list[logging.LogRecord]], AbstractContextManager[None]],
    level: int,
) -> None:
    logs.configure("INFO", "json")  # not in the fixture, because pytest adds its handler later
    seen: list[logging.LogRecord] = []

    with observe(seen):
        logs.log_rows(NAME, level, "Row changed", [{"id": 1}, {"id": 2}])

    assert [(record.getMessage(), vars(record)["id"]) for record in seen] == [("Row changed", 1), ("Row changed", 2)]
    assert [line["id"] for line in lines()] == [1, 2]


def test_records_of_rows_have_fields_of_record_factory_and_filters(lines: Lines) -> None:
    logs.configure("INFO", "json")
    seen: list[logging.LogRecord] = []

    with (
        _second_handler(seen),
        _factory_that_adds(host="a"),
        _filtered(logging.getLogger().handlers[0], _AddingFilter()),
    ):
        logs.log_rows(NAME, logging.ERROR, "Row changed", [{"id": 1}, {"id": 2}])

    assert [(line["id"], line["host"], line["level"], line["seen"]) for line in lines()] == [
        (1, "a", "error", 1),
        (2, "a", "critical", 2),
    ]
    assert [(vars(record)["id"], vars(record)["host"], record.module) for record in seen] == [
        (1, "a", "test_logs"),
        (2, "a", "test_logs"),
    ]


@contextmanager
def _factory_that_adds(**fields: Any) -> Iterator[None]:
    made = logging.getLogRecordFactory()

    def factory(*args: Any, **named: Any) -> logging.LogRecord:
        record = made(*args, **named)
        vars(record).update(fields)
        return record

    logging.setLogRecordFactory(factory)
    yield
    logging.setLogRecordFactory(made)


class _AddingFilter(logging.Filter):
    """Filter that adds a field to each record, and raises the level of the second."""

    def filter(self, record: logging.LogRecord) -> bool:
        vars(record)["seen"] = vars(record)["id"]
        if vars(record)["id"] == 2:
            record.levelno, record.levelname = logging.CRITICAL, "CRITICAL"
        return True


def test_filter_of_the_handler_leaves_out_single_rows(lines: Lines) -> None:
    logs.configure("INFO", "json")

    with _filtered(logging.getLogger().handlers[0], _first_only):
        logs.log_rows(NAME, logging.INFO, "Row changed", [{"id": 1}, {"id": 2}])

    assert [line["id"] for line in lines()] == [1]


def _first_only(record: logging.LogRecord) -> bool:
    return bool(vars(record)["id"] == 1)


def test_lines_of_other_loggers_keep_their_place_between_rows(lines: Lines) -> None:
    logs.configure("INFO", "json")

    def log(record: logging.LogRecord) -> None:
        with structlog.contextvars.bound_contextvars(run_id=8):
            logging.getLogger("theirs").warning("Seen", extra={"of": "x"})

    with _handled(NAME, log), structlog.contextvars.bound_contextvars(run_id=7):
        logs.log_rows(NAME, logging.INFO, "Row changed", [{"id": 1}, {"id": 2}])

    assert [(line["event"], line["logger"], line["level"], line["run_id"]) for line in lines()] == [
        ("Seen", "theirs", "warning", 8),
        ("Row changed", NAME, "info", 7),
    ] * 2


def test_a_row_that_cannot_be_formatted_does_not_affect_others(lines: Lines) -> None:
    logs.configure("INFO", "json")

    logs.log_rows(NAME, logging.INFO, "Row changed", [{"id": 1}, {"id": 10**5000}, {"id": 3}])

    assert [(line["event"], line.get("id")) for line in lines()] == [
        ("Row changed", 1),
        ("A log line could not be written", None),
        ("Row changed", 3),
    ]


def test_rows_arrive_as_extra_in_an_applications_own_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        logs.log_rows(NAME, logging.INFO, "Row changed", [{"id": 1}, {"id": 2}])

    assert [(record.getMessage(), vars(record)["id"]) for record in caplog.records] == [
        ("Row changed", 1),
        ("Row changed", 2),
    ]
