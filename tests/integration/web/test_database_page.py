"""Page of what the library costs PostgreSQL now."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient
from psycopg2.extensions import connection as Connection

from housekeeping import Settings, Sweep, Throttle
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.processes import eventually
from tests.integration.conftest import AddStatuses, Locked
from tests.integration.roles import connected_as_a_role
from tests.integration.sweeps.limits.test_db_health import background, until
from tests.internals.cli import doctor
from tests.internals.database import Database
from tests.internals.insight import DatabaseLoad, read_loads
from tests.internals.ledger import NOW, Run
from tests.internals.web import FindingsCache
from tests.internals.workers import status_sweep

pytestmark = pytest.mark.one_database_only(reason="the test names sessions of the only database")

OURS, THEIRS = "SET application_name = 'housekeeping'", "SET application_name = 'shop'"
LOCK = "LOCK TABLE user_statuses IN ACCESS EXCLUSIVE MODE"


def read(sweep: Sweep = status_sweep) -> DatabaseLoad:
    [load] = read_loads([sweep], wait=lambda seconds: None)
    return load


def limited(waiting_locks: int) -> Sweep:
    limits = replace(status_sweep.limits, throttle=Throttle(waiting_locks=waiting_locks))
    return replace(status_sweep, limits=limits)


@pytest.mark.parametrize("ours", [True, False], ids=["worker waits", "worker is waited for"])
def test_lock_wait_is_named_with_its_blocker(
    client: FlaskClient,
    application_url: str,
    add_statuses: AddStatuses,
    ours: bool,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_statuses(1, "now()")
    monkeypatch.setattr(doctor, "load_settings", lambda: settings)
    waiter, holder = (OURS, THEIRS) if ours else (THEIRS, OURS)

    with (
        background(application_url, holder, "BEGIN", LOCK, "SELECT pg_sleep(60)") as first,
        background(application_url, waiter, "BEGIN", LOCK) as second,
    ):
        until(lambda: any(each.pid in (first, second) for each in read().waits))
        [found] = [each for each in read().waits if each.pid in (first, second)]
        page = client.get("/database").get_data(as_text=True)
        command = " ".join(CliRunner().invoke(doctor.doctor, ["--database"]).output.split())

    blocked, blocker = (second, first) if found.pid == second else (first, second)
    assert found.blockers == [blocker] and found.table == "user_statuses"
    assert found.ours is (ours if blocked == second else not ours)
    assert f">{blocked} (" in page and "user_statuses" in page
    assert f"process {blocked} (" in command
    assert (f"SELECT pg_terminate_backend({blocker})" in command) is found.ours


def test_waiting_locks_over_the_limit_of_a_worker_are_marked(
    client: FlaskClient, application_url: str, add_statuses: AddStatuses, locked: Locked
) -> None:
    add_statuses(1, "now()")

    with locked("SELECT * FROM user_statuses FOR UPDATE"), background(application_url, f"BEGIN; {LOCK}"):
        until(lambda: _value(read(), "waiting_locks") == 1)
        loads = [read(limited(limit)) for limit in (0, 1)]

    assert [load.over for load in loads] == [True, False]


def _value(load: DatabaseLoad, name: str) -> float | None:
    return next(each.value for each in load.measures if each.name == name)


def test_open_run_shows_its_rows_per_second(postgres: Database, client: FlaskClient) -> None:
    counts = {status_sweep.progress_counts[0]: 300}
    began = NOW - timedelta(seconds=30)
    Run.create(
        worker=status_sweep.name, trigger="schedule", started_at=began, heartbeat_at=NOW, counts=counts, outcome=None
    )

    [rate] = read().workers

    assert rate.name == status_sweep.name and rate.value == pytest.approx(10, rel=0.1)
    assert "Rows/s of" in client.get("/database").get_data(as_text=True)


def test_table_without_autovacuum_is_marked_with_what_to_do(client: FlaskClient, postgres: Database) -> None:
    healthy = [each.over for each in read().tables]
    postgres.execute_sql("ALTER TABLE user_statuses SET (autovacuum_enabled = off)")

    page = client.get("/database").get_data(as_text=True)

    assert healthy == [False] and [each.over for each in read().tables] == [True]
    assert re.search(r'ALTER TABLE "?user_statuses"? RESET', page.replace("&#34;", '"'))


def test_role_with_the_rights_of_a_worker_reads_the_load(
    postgres: Database, settings: Settings, admin: Connection, add_statuses: AddStatuses
) -> None:
    with connected_as_a_role(postgres, settings, admin, {"user_statuses": ("SELECT",)}):
        load = read()

    assert load.incomplete == [] and _value(load, "wal_mb_per_s") is not None
    assert [each.table for each in load.tables] == ['"user_statuses"']


def test_page_is_read_once_for_all_readers(client: FlaskClient, statements: list[str]) -> None:
    eventually(lambda: "Findings of <code>housekeeping doctor</code>" in client.get("/database").get_data(as_text=True))
    del statements[:]

    for _ in range(5):
        client.get("/database")

    assert [sql for sql in statements if "pg_" in sql] == []


def test_ledger_that_is_locked_does_not_hang_the_page(client: FlaskClient, locked: Locked, settings: Settings) -> None:
    with locked(f'LOCK TABLE "{settings.schema_name}".runs'):
        page = client.get("/database")

    assert page.status_code == 200


def test_findings_of_the_doctor_are_kept_with_the_time_of_their_first_examination(
    postgres: Database, settings: Settings, statuses: type[UserStatus], admin: Connection
) -> None:
    clock = ManualClock(datetime(2026, 11, 20, 3, tzinfo=UTC))
    cache, began = FindingsCache(settings, {status_sweep.name: status_sweep}, clock), clock.now()

    def examine() -> list[tuple[str, str, datetime]]:
        clock.advance(timedelta(minutes=10))
        cache.refresh()
        eventually(lambda: cache.examined_at == clock.now())
        return [(each.area, each.subject, at) for each, at in cache.found.items() if each.area == status_sweep.name]

    postgres.execute_sql("ALTER TABLE user_statuses SET (autovacuum_enabled = off)")
    first, later = examine(), examine()
    postgres.execute_sql("ALTER TABLE user_statuses RESET (autovacuum_enabled)")

    found = (status_sweep.name, "autovacuum on user_statuses", began + timedelta(minutes=10))
    assert found in first and found in later
    assert "autovacuum on user_statuses" not in [subject for _, subject, _ in examine()]


def test_page_shows_findings_with_worker_and_remedy(client: FlaskClient, postgres: Database) -> None:
    postgres.execute_sql("ALTER TABLE user_statuses SET (autovacuum_enabled = off)")

    eventually(lambda: 'id="findings"' in (page := client.get("/database").get_data(as_text=True)) and "Found<" in page)
    row = re.search(r"autovacuum on .*?</tr>", client.get("/database").get_data(as_text=True), re.DOTALL)

    assert row is not None and "is off: deleted rows are never removed" in row[0] and "RESET" in row[0]
