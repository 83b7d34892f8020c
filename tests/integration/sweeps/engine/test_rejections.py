"""Rejected records: a few log lines, one report and one row for each cause, whatever their number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from peewee import PeeweeException, fn

from housekeeping import Argument, Settings
from housekeeping.testing.stubs import ManualClock
from tests.integration.middleware.applications import close_all, eventually, installed, queued, working
from tests.integration.sweeps.orders import Order, add, sweep
from tests.internals.core import error_reporting
from tests.internals.database import Database
from tests.internals.engine import CAUSES, LINES, OTHER_CAUSES, SAMPLES, Rejections, failures, register, run_sweep
from tests.internals.ledger import Rejection, Run, deferred, history
from tests.internals.sweeps import BatchResult, Failure, TableStage

Lines = Callable[[str], list[Any]]


@pytest.fixture(autouse=True)
def orders(postgres: Database) -> None:
    postgres.create_tables([Order])


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return lambda event: [record for record in caplog.records if record.getMessage() == event]


def refuse_all(order: Order) -> None:
    raise ValueError(f"no order {order.reference!r}")


def break_off(order: Order) -> None:
    """Fail as a service does that is unavailable, which ends the run."""
    raise ConnectionResetError("reset")


def refuse_most(order: Order) -> None:
    """Settle each tenth: a run in which many rows in a row fail alike is ended."""
    if order.id % 10:
        refuse_all(order)


def let_an_hour_pass() -> None:
    for cause in failures.reported_at:
        failures.reported_at[cause] -= 3600


def standing() -> list[tuple[str, int]]:
    return [(each.cause, each.rows) for each in Rejection.select().order_by(Rejection.cause)]


def test_records_of_one_cause_are_one_report_with_samples(clock: ManualClock, reported: list[dict[str, Any]]) -> None:
    add(30)

    result = run_sweep(sweep(refuse_most), clock=clock)

    assert result.counts["failed"] == 27
    (report,) = reported
    assert (report["worker"], report["run_id"], report["rows"]) == ("shop.stuck_orders", result.run_id, 27)
    assert [each["id"] for each in report["samples"]] == [1, 2, 3, 4, 5][:SAMPLES]
    assert report["id"] == 1, "the fields of the first record"


def test_first_records_of_a_cause_have_lines_and_the_rest_a_summary(clock: ManualClock, lines: Lines) -> None:
    add(LINES + 5)

    run_sweep(sweep(refuse_most), clock=clock)

    assert len(lines("Record rejected")) == LINES
    (summary,) = lines("More records rejected")
    assert (summary.cause, summary.rows, summary.logged) == ("ValueError: no order ...", LINES + 3, LINES)


def test_failed_runs_of_one_cause_are_reported_once_an_hour(clock: ManualClock, reported: list[dict[str, Any]]) -> None:
    add(1)
    broken = sweep(break_off)

    for _ in range(3):
        assert run_sweep(broken, clock=clock).outcome == "failed"
    within_the_hour = len(reported)
    let_an_hour_pass()
    run_sweep(broken, clock=clock)

    assert (within_the_hour, len(reported)) == (1, 2)
    assert reported[0]["cause"] == "ConnectionResetError: reset"


def test_failed_run_defers_its_argument_only(clock: ManualClock) -> None:
    add(1)
    broken = sweep(break_off, argument=Argument("shop", int))

    results = [run_sweep(broken, 7, clock=clock), run_sweep(sweep(lambda order: None), clock=clock)]

    assert [result.is_deferred for result in results] == [True, False]
    (row,) = Rejection.select()
    assert (row.subject, row.cause, row.rows, row.times) == ("7", "ConnectionResetError: reset", 0, 1)
    assert row.sample == {"record": {}, "error": "reset"}
    assert [subject for subject, _ in deferred("shop.stuck_orders").tuples()] == ["7"]


def test_run_whose_stale_rows_cannot_be_counted_defers_its_argument(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset(*_: Any) -> None:
        raise ConnectionResetError("reset")

    monkeypatch.setattr(TableStage, "probes", reset)

    result = run_sweep(sweep(lambda order: None, argument=Argument("shop", int)), 7, clock=clock)

    assert (result.outcome, result.is_deferred, standing()) == ("failed", True, [("ConnectionResetError: reset", 0)])


@pytest.mark.parametrize("argument_name", [None, "shop"])
def test_failed_run_of_an_unreachable_database_defers_nothing(
    clock: ManualClock, postgres: Database, monkeypatch: pytest.MonkeyPatch, argument_name: str | None
) -> None:
    add(1)
    argument = None if argument_name is None else Argument(argument_name)
    broken = sweep(lambda order: None, argument=argument)

    def disconnect(*_: Any) -> None:
        postgres.execute_sql("SELECT pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(TableStage, "probes", disconnect)

    result = run_sweep(broken, None if argument_name is None else 7, clock=clock)

    assert (result.outcome, result.is_deferred, standing()) == ("failed", False, [])


@pytest.mark.parametrize("rediscovered", [True, False])
def test_deferred_argument_is_retried_unless_a_scheduler_sends_it_again(
    clock: ManualClock, settings: Settings, rediscovered: bool
) -> None:
    # A retry would not keep to the delay.
    add(1)
    broken = sweep(
        break_off,
        argument=Argument("shop", int),
        actor={"rediscovered": rediscovered, "deduplicate": "until_executed"},
    )
    broker = installed(settings.model_copy(update={"database_url": None}))
    actor = register(broker, broken)

    with working(broker):
        actor.send(7)
        eventually(lambda: Run.select().where(Run.outcome == "failed").exists() and not queued(broker, broken.queue))
        retries = queued(broker, f"{broken.queue}.DQ")
    close_all()

    assert [message.args for message in retries] == ([] if rediscovered else [(7,)])


def test_rejections_are_reported_although_they_cannot_be_recorded(
    clock: ManualClock, postgres: Database, reported: list[dict[str, Any]], lines: Lines
) -> None:
    add(1)
    # Not the whole table: the ledger looks at it when a run begins.
    postgres.execute_sql(f"ALTER TABLE {Rejection._meta.schema}.rejections DROP COLUMN sample")

    outcome = run_sweep(sweep(refuse_all), clock=clock).outcome

    assert (outcome, len(reported), len(lines("Could not record the rejections"))) == ("done", 1, 1)


def test_rejections_are_recorded_until_a_complete_run_has_none(clock: ManualClock) -> None:
    add(3)

    run_sweep(sweep(refuse_all), clock=clock)
    (first,) = Rejection.select()
    run_sweep(sweep(refuse_all), clock=clock)
    (second,) = Rejection.select()
    run_sweep(sweep(lambda order: None), clock=clock)

    assert (first.worker, first.subject, first.cause, first.rows) == (
        "shop.stuck_orders",
        "",
        "ValueError: no order ...",
        3,
    )
    assert first.sample["record"]["id"] == 1 and "order 1" in first.sample["error"]
    assert (second.since, second.last_at > first.last_at) == (first.since, True)
    assert standing() == []


def test_run_cut_short_removes_no_cause(clock: ManualClock) -> None:
    add(12)
    run_sweep(sweep(lambda order: refuse_all(order) if order.id > 10 else None), clock=clock)
    before = standing()
    add_more(1)
    stopping = threading.Event()

    result = run_sweep(
        sweep(lambda order: None, batch=1), clock=clock, stopping=stopping, on_batch=lambda counts: stopping.set()
    )

    assert (result.outcome, result.reason) == ("partial", "shutdown")
    assert standing() == before != []


def add_more(first_id: int) -> None:
    Order.update(status="pending").where(Order.id == first_id).execute()


def test_failed_run_still_reports_its_rejections(clock: ManualClock, reported: list[dict[str, Any]]) -> None:
    add(7)

    def refuse_then_break(order: Order) -> None:
        if order.id > 5:
            raise ConnectionResetError("reset")
        refuse_all(order)

    result = run_sweep(sweep(refuse_then_break), clock=clock)

    assert (result.outcome, result.counts["failed"]) == ("failed", 5)
    assert sorted(each.get("rows", 0) for each in reported) == [0, 5], "the run's own error, and the cause"
    assert standing() == [("ValueError: no order ...", 5)]


def test_causes_of_a_run_are_bounded(clock: ManualClock, reported: list[dict[str, Any]]) -> None:
    add(40)

    def refuse_most_in_other_words(order: Order) -> None:
        if order.id % 10:
            raise ValueError("".join(chr(ord("a") + int(digit)) for digit in f"{order.id:02}"))

    run_sweep(sweep(refuse_most_in_other_words), clock=clock)

    assert len(reported) == CAUSES + 1
    assert (OTHER_CAUSES, 36 - CAUSES) in standing()
    assert sum(rows for _, rows in standing()) == 36


def test_long_values_are_shortened_in_lines_and_rows(clock: ManualClock, lines: Lines) -> None:
    add(1)

    def refuse_at_length(order: Order) -> None:
        raise ValueError("'" + "x" * 5000 + "' is in the way\0")

    run_sweep(sweep(refuse_at_length), clock=clock)

    (line,) = lines("Record rejected")
    assert len(line.error) <= 300 and line.error.endswith("is in the way\\x00")
    (row,) = Rejection.select()
    assert len(row.cause) <= 300 and len(row.sample["error"]) <= 300


def test_database_errors_are_grouped_by_code_and_constraint(clock: ManualClock, postgres: Database) -> None:
    add(4)
    postgres.execute_sql("ALTER TABLE orders ADD CONSTRAINT stays CHECK (id < 3 OR status = 'pending')")

    run_sweep(sweep(lambda order: None), clock=clock)

    assert standing() == [("IntegrityError 23514: constraint stays", 2)]


def test_row_of_the_run_has_its_rejected_records_by_cause(clock: ManualClock) -> None:
    add(30)

    result = run_sweep(sweep(refuse_most), clock=clock)

    assert result.run_id is not None
    (group,) = history.failures_of(result.run_id).rejected
    assert (group.rows, group.error) == (27, "no order 'order 1'")
    assert [each["id"] for each in group.records] == [1, 2, 3, 4, 5]


def test_later_run_keeps_the_rejected_records_of_an_earlier_one(clock: ManualClock) -> None:
    add(30)
    first, second = (run_sweep(sweep(refuse_most), clock=clock).run_id or 0 for _ in range(2))

    assert [bool(history.failures_of(each).rejected) for each in (first, second)] == [True, True]


def test_rejected_records_of_a_run_are_bounded(clock: ManualClock, postgres: Database) -> None:
    records = [
        Failure({"id": n, "note": "x" * 250, **{f"c{m}": "\0" * 250 for m in range(40)}}, ValueError(f"{n:x}"))
        for n in range(40)
    ]
    run = run_sweep(sweep(lambda order: None), clock=clock)

    rejections = Rejections("shop.stuck_orders", run.run_id)
    rejections.add(BatchResult({}, failures=records))
    rejections.close(complete=False, delayed=False, rejected_before=False, position=None)

    size: int = Run.select(fn.LENGTH(Run.rejected.cast("text"))).where(Run.id == run.run_id).scalar()
    assert run.run_id is not None and sum(each.rows for each in history.failures_of(run.run_id).rejected) == 40
    assert size < 100_000


def test_recorded_causes_are_bounded() -> None:
    for number in range(0, 90, 10):
        found = {f"cause {n}": failures.Rejected(1, {}) for n in range(number, number + 10)}
        failures.record("shop.stuck_orders", "", found, complete=False, delayed=False, position=None)

    newest: datetime = Rejection.select(fn.MAX(Rejection.last_at)).scalar()
    assert Rejection.select().count() == 50
    assert Rejection.select().where((Rejection.cause == "cause 89") & (Rejection.last_at == newest)).exists()


@pytest.mark.parametrize(("times", "minutes"), [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (5000, 60)])
def test_delay_doubles_from_a_minute_to_an_hour(times: int, minutes: int) -> None:
    assert failures.delay_after(times) == timedelta(minutes=minutes)


def test_error_hook_that_raises_does_not_block_other_causes(
    clock: ManualClock, error_hooks: list[error_reporting.Hook]
) -> None:
    seen: list[Any] = []

    def hook(error: BaseException, about: dict[str, Any]) -> None:
        seen.append(about["rows"])
        raise PeeweeException("the tracker is away")

    error_hooks.append(hook)
    add(4)

    def refuse_in_two_ways(order: Order) -> None:
        raise ValueError("odd") if order.id % 2 else KeyError("even")

    result = run_sweep(sweep(refuse_in_two_ways), clock=clock)

    assert (result.outcome, seen) == ("done", [2, 2])
