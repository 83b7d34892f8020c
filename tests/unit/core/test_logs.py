from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog

from tests.internals.core import logs, mask_secrets
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
