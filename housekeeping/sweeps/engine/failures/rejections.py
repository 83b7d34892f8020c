"""Rejected records of a run, grouped by cause: a few log lines, one report and one row for each cause."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from peewee import PeeweeException

from housekeeping.core.sanitize import error_line, in_one_line, shortened
from housekeeping.core.telemetry.error_reporting import report
from housekeeping.core.telemetry.logs import logger as named_logger
from housekeeping.core.telemetry.logs import to_log_value
from housekeeping.sweeps.engine.failures import rejection_store
from housekeeping.sweeps.engine.failures.rejection_store import Rejected
from housekeeping.sweeps.stages.causes import cause_of
from housekeeping.sweeps.stages.stage import BatchResult, Failure, Position

logger = named_logger(__name__)

LINES: Final = 20  # records of a cause that have a log line of their own in a run
SAMPLES: Final = 5  # records of a cause in its report
CAUSES: Final = 20  # distinct causes of a run, which bounds its memory, log lines and reports
OTHER_CAUSES: Final = "other causes"
_LONGEST_VALUE: Final = 300  # characters of a value in a log line, report or row
_LONGEST_ROW: Final = 50_000  # characters of all records in the row of a run


@dataclass(slots=True)
class _Group:
    """The records of one cause; `error` is that of the first."""

    error: BaseException
    rows: int = 0
    logged: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, failure: Failure) -> None:
        self.rows += 1
        if len(self.samples) < SAMPLES:
            self.samples.append(short_record(failure.record))


class Rejections:
    """Records that a run could not process, or processed by a fallback after an error.

    Parameters:
      worker: The worker's name.
      run_id: The run's row in the ledger.
    """

    def __init__(self, worker: str, run_id: int | None, argument: Any = None) -> None:
        self.worker = worker
        self.run_id = run_id
        self.subject = rejection_store.subject_of(argument)
        self._rejected: dict[str, _Group] = {}
        self._rescued: dict[str, _Group] = {}

    def add(self, result: BatchResult) -> None:
        """Group the batch's rejected records, and log the first of each cause."""
        for failure in result.failures:
            group = _add(self._rejected, failure)
            if group.logged < LINES:
                group.logged += 1
                error = shortened(error_line(failure.error), _LONGEST_VALUE)
                logger.error("Record rejected", record=short_record(failure.record), error=error)
        for failure in result.rescued:
            _add(self._rescued, failure)

    def close(self, *, complete: bool, delayed: bool, rejected_before: bool, position: Position | None) -> None:
        """Log, record and report each cause once; never raises.

        Parameters:
          complete: Whether the run reached the end. Recorded causes that it did not meet are then removed.
          delayed: Whether it rejected every record and was not interrupted.
          rejected_before: Whether an earlier run left rejections in the table.
          position: Where the run ended.
        """
        for cause, group in self._rejected.items():
            if group.rows > group.logged:
                logger.error("More records rejected", cause=cause, rows=group.rows, logged=group.logged)
        if self._rejected or (complete and rejected_before):
            self._record(complete, delayed, position)
        due = rejection_store.due_for_report(self.worker, list(self._rejected)) if self._rejected else set()
        # A record handled by the fallback does not fail again, so its report is not throttled.
        for group in (*(self._rejected[cause] for cause in self._rejected if cause in due), *self._rescued.values()):
            # Last, because a column of the record may have one of these names.
            about = {"worker": self.worker, "run_id": self.run_id, "rows": group.rows, "samples": group.samples}
            report(group.error, **{**group.samples[0], **about})

    def _record(self, complete: bool, delayed: bool, position: Position | None) -> None:
        found = {
            cause: Rejected(group.rows, _storable(group.samples[0], group.error))
            for cause, group in self._rejected.items()
        }
        try:
            rejection_store.record(
                self.worker,
                self.subject,
                found,
                complete=complete,
                delayed=delayed,
                position=position,
                run=(self.run_id, stored_groups(self._rejected)) if self.run_id is not None and found else None,
            )
        except PeeweeException as error:
            logger.warning("Could not record the rejections", error=error_line(error))


def stored_groups(groups: Mapping[str, _Group]) -> list[dict[str, Any]]:
    """Return the causes of a run for its row: ``{"cause", "rows", "error", "records"}``.

    Records beyond the longest value that a row may have are left out; `rows` counts them.
    """
    stored, left = [], _LONGEST_ROW
    for cause, group in groups.items():
        records: list[dict[str, Any]] = []
        for sample in group.samples:
            record: dict[str, Any] = _printable(to_log_value(dict(sample)))
            left -= len(json.dumps(record))
            if left > 0:
                records.append(record)
        error = _printable(error_line(group.error))
        stored.append({"cause": _printable(cause), "rows": group.rows, "error": error, "records": records})
    return stored


def _add(groups: dict[str, _Group], failure: Failure) -> _Group:
    cause = cause_of(failure.error, failure.record)
    if cause not in groups and len(groups) >= CAUSES:
        cause = OTHER_CAUSES
    group = groups.setdefault(cause, _Group(failure.error))
    group.add(failure)
    return group


def short_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with long values shortened."""
    return {name: _short(value) for name, value in record.items()}


def _short(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else str(to_log_value(value))
    # Short values keep their type, because log lines and error trackers format times and lists themselves.
    return value if len(text) <= _LONGEST_VALUE else shortened(text, _LONGEST_VALUE)


def _storable(sample: Mapping[str, Any], error: BaseException) -> dict[str, Any]:
    """Return the sample and its error as values for jsonb."""
    values = {"record": to_log_value(dict(sample)), "error": error_line(error)}
    stored: dict[str, Any] = _printable(values)
    return stored


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return in_one_line(shortened(value, _LONGEST_VALUE), _LONGEST_VALUE)
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list) else value
