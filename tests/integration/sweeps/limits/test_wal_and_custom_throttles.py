"""Throttles by the server's WAL, by replication slots and by the application's own function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, timedelta
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, Throttle
from housekeeping.testing.stubs import ManualClock
from tests.declarations import changed
from tests.integration.conftest import AddStatuses
from tests.integration.sweeps.engine.sizing import DUE, SMALL, Impatient
from tests.internals.core import SettingsError, ThrottleSettings, WorkerSettings
from tests.internals.database import Database
from tests.internals.engine import WalRate, WalState, read_wal, run_sweep, speed
from tests.internals.insight import worker_status
from tests.internals.ledger import Run
from tests.session_settings import set_in_session

LONG = changed(SMALL, runtime=timedelta(minutes=10))
OFF: dict[str, Any] = {"replication_lag_s": None, "waiting_locks": None}
MB = 1024 * 1024


def too_busy() -> str:
    return "checkout is slow"


def not_busy() -> None:
    return None


NOT_A_FUNCTION = 7


@pytest.fixture
def slot(admin: Connection) -> Iterator[None]:
    """A replication slot that keeps all WAL from now on."""
    with admin.cursor() as cursor:
        cursor.execute("SELECT pg_create_physical_replication_slot('housekeeping_test', true)")
        yield
        cursor.execute("SELECT pg_drop_replication_slot('housekeeping_test')")


def test_wal_rate_is_measured_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([WalState(100 * MB, 5.0), WalState(106 * MB, 0.0), WalState(1 * MB, 0.0), WalState(None)])
    monkeypatch.setattr(speed, "read_wal", lambda: next(states))
    rate = WalRate()

    first, is_first = rate.look(10.0), rate.is_first
    second, after_failover, unknown = (rate.look(now) for now in (12.0, 14.0, 16.0))

    assert (first.mb_per_s, is_first, first.slot_lag_mb) == (None, True, 5.0)
    assert (second.mb_per_s, rate.is_first, second.slot_lag_mb) == (3.0, False, 0.0)
    assert (after_failover.mb_per_s, unknown.mb_per_s, unknown.slot_lag_mb) == (0.0, None, None)


def test_postgres_reports_wal_and_the_slowest_slot(postgres: Database, admin: Connection, slot: None) -> None:
    before = read_wal()
    with admin.cursor() as cursor:
        cursor.execute("CREATE TABLE filling AS SELECT repeat('x', 1000) AS text FROM generate_series(1, 2000)")
    after = read_wal()

    assert before.position is not None and after.position is not None and after.slot_lag_mb is not None
    assert after.position - before.position > 2_000_000
    assert after.slot_lag_mb > 2 and after.trouble is None


def test_slot_that_is_lost_keeps_no_wal(postgres: Database, settings: Settings) -> None:
    set_in_session(postgres, f"search_path TO {settings.namespace}, pg_catalog")
    slots = "SELECT '0/0'::pg_lsn AS restart_lsn, '{}'::text AS wal_status"
    found = []
    for status in ("extended", "lost"):
        postgres.execute_sql(f"CREATE OR REPLACE VIEW pg_replication_slots AS {slots.format(status)}")
        found.append(read_wal())

    assert found[0].slot_lag_mb and found[0].slot_lag_mb > 1
    assert (found[1].slot_lag_mb, found[1].trouble) == (0, None)


def test_wal_of_the_run_itself_throttles_it_from_the_second_look_on(
    add_statuses: AddStatuses, clock: ManualClock, last_run: Callable[[], Run]
) -> None:
    add_statuses(1000, DUE)
    stopping = Impatient(clock)
    limits = Throttle(**OFF, wal_mb_per_s=0.000001)

    result = run_sweep(
        changed(LONG, throttle=limits),
        clock=clock,
        stopping=stopping,
        on_batch=lambda counts: clock.advance(timedelta(seconds=0.5)),
    )

    assert (result.outcome, result.reason) == ("partial", "gate")
    assert last_run().counts["throttled"]["gate"] == "wal_mb_per_s"
    assert result.counts["deleted_rows"] > 40, "four batches before the second look"
    assert stopping.waits[0] == 0.1


@pytest.mark.parametrize(("limit", "outcome"), [(0.000001, "partial"), (1_000_000.0, "done")])
def test_slot_that_keeps_too_much_wal_throttles(
    add_statuses: AddStatuses, clock: ManualClock, slot: None, limit: float, outcome: str
) -> None:
    add_statuses(1000, DUE)

    result = run_sweep(
        changed(LONG, throttle=Throttle(**OFF, slot_lag_mb=limit)),
        clock=clock,
        stopping=Impatient(clock),
    )

    assert result.outcome == outcome
    assert result.counts.get("throttled", {}).get("gate") == ("slot_lag_mb" if outcome == "partial" else None)


def test_reason_of_a_custom_function_throttles_and_is_recorded(
    add_statuses: AddStatuses, clock: ManualClock, last_run: Callable[[], Run]
) -> None:
    add_statuses(1000, DUE)
    own = changed(LONG, throttle=Throttle(**OFF, custom=too_busy))

    for _ in range(3):
        result = run_sweep(own, clock=clock, stopping=Impatient(clock))

    assert (result.outcome, result.reason) == ("partial", "gate")
    assert last_run().counts["throttled"] == {"gate": "custom", "value": "checkout is slow", "limit": None}
    alerts = [each for each in worker_status(own, clock.now(), UTC).alarms if each.name == "throttled"]
    assert [(each.limit, each.value) for each in alerts] == [(None, None)]
    assert alerts[0].text.startswith("custom (checkout is slow) slowed the last 3 runs and ended them early")


def test_run_continues_when_the_custom_function_stops_asking(add_statuses: AddStatuses, clock: ManualClock) -> None:
    add_statuses(30, DUE)
    reasons = iter(["busy", "busy\nstill", None])
    stopping = Impatient(clock)
    own = changed(LONG, throttle=Throttle(**OFF, custom=lambda: next(reasons)))

    result = run_sweep(own, clock=clock, stopping=stopping)

    assert (result.outcome, result.counts["deleted_rows"]) == ("done", 30)
    assert 4 <= sum(stopping.waits) <= 6


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: False, "TypeError: it returned False; it should return None or the reason as text"),
    ],
)
def test_custom_function_that_fails_is_logged_once_and_ignored(
    add_statuses: AddStatuses, clock: ManualClock, caplog: pytest.LogCaptureFixture, function: Any, error: str
) -> None:
    add_statuses(50, DUE)
    own = changed(LONG, throttle=Throttle(**OFF, custom=function))

    with caplog.at_level("INFO"):
        result = run_sweep(own, clock=clock, on_batch=lambda counts: clock.advance(timedelta(seconds=2)))

    logged = [each.__dict__ for each in caplog.records if each.getMessage().startswith("Health check unavailable")]
    assert result.outcome == "done"
    assert [(each["gate"], each["error"]) for each in logged] == [("custom", error)]


def test_custom_function_is_set_by_its_dotted_name() -> None:
    settings = WorkerSettings(gates=ThrottleSettings(custom=f"{__name__}.not_busy", wal_mb_per_s=50, slot_lag_mb=1000))

    throttle = LONG.configured(settings).limits.throttle

    assert throttle.custom is not None and throttle.custom() is None
    assert (throttle.wal_mb_per_s, throttle.slot_lag_mb, throttle.replication_lag_s) == (50, 1000, 30)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module.busy", "which cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}.nothing", "which cannot be imported: AttributeError"),
        (f"{__name__}.NOT_A_FUNCTION", "which is no function but 7"),
    ],
)
def test_wrong_name_of_a_function_is_rejected_in_one_line(name: str, text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        LONG.configured(WorkerSettings(gates=ThrottleSettings(custom=name)))

    assert str(refused.value).startswith(f'HOUSEKEEPING_WORKERS["{SMALL.name}"]["gates"]["custom"] is {name!r}, {text}')
    assert "\n" not in str(refused.value)
