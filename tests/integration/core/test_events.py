"""Events after the commit, as an application's subscribers meet them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from blinker import NamedSignal, Namespace

from housekeeping import events
from tests.internals.core import error_reporting

ROWS = [{"id": 1}, {"id": 2}]


@pytest.fixture
def event() -> NamedSignal:
    return Namespace().signal("something_done")


class Subscriber:
    """Subscriber that records its calls."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def __call__(self, sender: Any, **about: Any) -> None:
        self.told.append({"sender": sender, **about})


def test_subscriber_gets_rows_worker_and_run_id(event: NamedSignal) -> None:
    subscriber = Subscriber()
    event.connect(subscriber)

    events.send(event, ROWS, worker="a.worker", run_id=7)

    assert subscriber.told == [{"sender": "a.worker", "rows": ROWS, "worker": "a.worker", "run_id": 7}]


def test_event_without_rows_is_not_sent(event: NamedSignal) -> None:
    subscriber = Subscriber()
    event.connect(subscriber)

    events.send(event, [], worker="a.worker", run_id=7)

    assert subscriber.told == []


def test_subscriber_of_one_worker_gets_no_other_workers_events(event: NamedSignal) -> None:
    subscriber = Subscriber()
    event.connect(subscriber, sender="a.worker")

    events.send(event, ROWS, worker="a.worker", run_id=1)
    events.send(event, ROWS, worker="another.worker", run_id=2)

    assert [about["run_id"] for about in subscriber.told] == [1]


def test_raising_subscriber_is_reported_and_the_others_are_called(
    event: NamedSignal, reported: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    before, after = Subscriber(), Subscriber()

    def fail(sender: Any, **about: Any) -> None:
        raise OSError("the mail server is away")

    for subscriber in (before, fail, after):
        event.connect(subscriber, weak=False)

    events.send(event, ROWS, worker="a.worker", run_id=7)

    assert (len(before.told), len(after.told)) == (1, 1)
    (about,) = reported
    assert str(about.pop("error")) == "the mail server is away"
    assert about == {"worker": "a.worker", "run_id": 7, "subscribed_to": "something_done"}
    (line,) = [record for record in caplog.records if record.message == "An event subscriber failed"]
    assert (line.levelno, line.exc_info is not None) == (logging.ERROR, True)


def test_subscriber_with_a_wrong_signature_is_skipped(event: NamedSignal, reported: list[dict[str, Any]]) -> None:
    def too_narrow(sender: Any) -> None: ...

    event.connect(too_narrow)
    after = Subscriber()
    event.connect(after)

    events.send(event, ROWS, worker="a.worker", run_id=7)

    assert (len(after.told), [type(about["error"]) for about in reported]) == (1, [TypeError])


def test_subscribers_get_copies_of_the_rows(event: NamedSignal) -> None:
    rows, seen = [{"id": 1}, {"id": 2}], list[list[dict[str, Any]]]()

    def note_and_spoil(sender: Any, rows: list[dict[str, Any]], **about: Any) -> None:
        seen.append([dict(row) for row in rows])
        rows[0]["id"] = 99
        rows.pop()

    def likewise(sender: Any, **about: Any) -> None:
        note_and_spoil(sender, **about)

    for subscriber in (note_and_spoil, likewise):
        event.connect(subscriber)

    events.send(event, rows, worker="a.worker", run_id=7)

    assert seen == [ROWS, ROWS]
    assert rows == ROWS


def test_error_hook_that_raises_is_skipped(event: NamedSignal, error_hooks: list[error_reporting.Hook]) -> None:
    def fail(*about: Any, **more: Any) -> None:
        raise OSError("the tracker is away")

    error_hooks.append(fail)
    event.connect(fail)
    after = Subscriber()
    event.connect(after)

    events.send(event, ROWS, worker="a.worker", run_id=7)

    assert len(after.told) == 1
