"""What `housekeeping coverage` finds: the state of each table, its size, its growth and its oldest row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any, Final

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Anonymise, Delete, Keep, Kept, Reference, Rows, Settings, Subject, Sweep
from tests.declarations import changed
from tests.integration.conftest import Do, Locked
from tests.integration.sweeps.limits.test_db_health import until
from tests.internals.core import SettingsError
from tests.internals.database import Database, database
from tests.internals.engine import family_of, run_sweep
from tests.internals.insight import CoveredTable, read_coverage
from tests.internals.ledger import NOW, Run, TableSize
from tests.internals.workers import BUILT_IN, kept_tables
from tests.internals.workers import old_runs_sweep as old_runs

DAY: Final = timedelta(days=1)


def sweep(name: str, table: str, **more: Any) -> Sweep:
    action = more.pop("action", Delete())
    return Sweep(name, Rows(table, stale=lambda row, now: row.at < now, order="at", action=action), **more)


SESSIONS: Final = sweep("shop.sessions", "session")


def create(do: Do, *names: str) -> None:
    for name in names:
        do(f"CREATE TABLE {name} (id integer PRIMARY KEY, at timestamptz)")


def covered(
    sweeps: Sequence[Sweep] = (), kept: Sequence[Kept] = (), subjects: Sequence[Subject] = ()
) -> dict[str, CoveredTable]:
    found = read_coverage(sweeps, kept, subjects)
    assert found.unavailable == {}
    return {each.table: each for each in found.tables}


def test_table_is_swept_kept_or_undecided(do: Do) -> None:
    create(do, "session", "country", "forgotten")

    found = covered([SESSIONS], [Kept("country", "reference data")])

    states = {name: (each.state, each.by, each.reason) for name, each in found.items() if each.state != "own"}
    assert states == {
        "session": ("swept", ("shop.sessions",), None),
        "country": ("kept", (), "reference data"),
        "forgotten": ("undecided", (), None),
    }


def test_own_tables_and_archives_are_named_as_such(do: Do) -> None:
    create(do, "session")
    do("CREATE TABLE old_session (id integer, at timestamptz, archived_at timestamptz, archived_by_run bigint)")

    found = covered([sweep("shop.sessions", "session", action=Delete(archive_to="old_session")), old_runs])

    assert (found["old_session"].state, found["old_session"].by) == ("archive", ("shop.sessions",))
    own = {name.rpartition(".")[2]: each.by for name, each in found.items() if each.state == "own"}
    assert {"runs", "leases", "outbox", "table_sizes", "migrations"} <= set(own)
    assert (own["runs"], own["migrations"]) == (("housekeeping.old_runs",), ())


def test_table_whose_rows_go_with_others_is_swept(do: Do) -> None:
    create(do, "session")
    do(
        "CREATE TABLE visit (id integer PRIMARY KEY, session_id integer REFERENCES session ON DELETE CASCADE);"
        "CREATE TABLE click (visit_id integer REFERENCES visit ON DELETE CASCADE);"
        "CREATE TABLE payment (session_id integer REFERENCES session ON DELETE SET NULL)"
    )

    found = covered([SESSIONS])

    assert (found["visit"].state, found["visit"].reason) == ("swept", "with the rows of session")
    assert (found["click"].state, found["click"].by) == ("swept", ("shop.sessions",))
    assert found["payment"].state == "undecided"


def test_cascade_that_is_not_enforced_cleans_no_table(do: Do, postgres_18: None) -> None:
    create(do, "session")
    do("CREATE TABLE visit (id integer, session_id integer REFERENCES session ON DELETE CASCADE NOT ENFORCED)")

    assert covered([SESSIONS])["visit"].state == "undecided"


def test_table_that_a_declared_cascade_deletes_is_swept_and_a_kept_one_is_not(do: Do) -> None:
    create(do, "session")
    do(
        "CREATE TABLE visit (id integer PRIMARY KEY, session_id integer REFERENCES session);"
        "CREATE TABLE payment (id integer PRIMARY KEY, session_id integer REFERENCES session ON DELETE CASCADE)"
    )
    cascade = sweep("shop.cascade", "session", action=Delete(dependents={"visit": "delete", "payment": "keep"}))

    found = covered([cascade])

    assert (found["visit"].state, found["visit"].reason) == ("swept", "with the rows of session")
    assert found["payment"].state == "undecided"


def test_refused_cascade_keeps_no_table_clean(do: Do) -> None:
    create(do, "session")
    do("CREATE TABLE visit (id integer PRIMARY KEY, session_id integer REFERENCES session)")

    found = covered([sweep("shop.cascade", "session", action=Delete(dependents=True))])

    assert found["session"].state == "undecided"
    assert "shop.cascade is refused" in (found["session"].reason or "")


def test_disabled_sweep_keeps_no_table_clean(do: Do) -> None:
    create(do, "session")

    found = covered([changed(SESSIONS, enabled=False)])

    assert (found["session"].state, found["session"].reason) == ("undecided", "shop.sessions is disabled")


def test_partitions_count_as_their_table(do: Do) -> None:
    do(
        "CREATE TABLE event (id integer, at timestamptz) PARTITION BY RANGE (id);"
        "CREATE TABLE event_low PARTITION OF event FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (id);"
        "CREATE TABLE event_low_1 PARTITION OF event_low FOR VALUES FROM (0) TO (50);"
        "CREATE TABLE event_high PARTITION OF event FOR VALUES FROM (100) TO (200);"
        "INSERT INTO event SELECT n, now() FROM generate_series(0, 149) AS n WHERE n NOT BETWEEN 50 AND 99;"
        "ANALYZE event, event_low_1, event_high"
    )

    found = covered(kept=[Kept("event_high", "evidence")])

    assert [name for name in found if name.startswith("event")] == ["event"]
    assert (found["event"].state, found["event"].rows, found["event"].bytes) == ("kept", 100, 2 * 8192)


def test_table_of_another_schema_needs_its_schema(do: Do, settings: Settings) -> None:
    other = f"{settings.namespace}_audit"
    do(f'CREATE SCHEMA {other}; CREATE TABLE {other}."Event" (id integer)')

    without = read_coverage((), [Kept("Event", "log")])
    found = covered(kept=[Kept(f'{other}."Event"', "log")])
    do(f"DROP SCHEMA {other} CASCADE")

    assert without.unfit == ["Event"]
    assert found[f'{other}."Event"'].state == "kept"


@pytest.mark.parametrize("module", BUILT_IN, ids=lambda module: module.__name__)
def test_built_in_workers_say_which_tables_they_keep_clean(postgres: Database, module: ModuleType) -> None:
    models: dict[str, Any] = module.MODELS
    database.create_tables(list(models.values()))
    sweeps = [changed(each, enabled=True) for each in family_of(module).sweeps]

    found = covered(sweeps)

    assert {found[model._meta.table_name].state for model in models.values()} <= {"swept"}


def test_growth_is_measured_between_two_nights(do: Do) -> None:
    create(do, "session")
    do("CREATE TABLE steady (id integer)")
    run_sweep(old_runs)
    before = covered()["session"].growth_bytes_per_day
    TableSize.update(at=NOW - 2 * DAY).execute()
    do("INSERT INTO session SELECT n, now() FROM generate_series(1, 10000) AS n")

    run_sweep(old_runs)
    found = list(covered())
    again = run_sweep(old_runs).counts["sampled_tables"]

    table = covered()["session"]
    assert before is None and table.growth_bytes_per_day is not None and table.bytes is not None
    assert table.growth_bytes_per_day == pytest.approx((table.bytes - 8192) / 2, rel=0.01)
    assert (found[0], again) == ("session", 0)


def test_size_of_a_dropped_table_is_forgotten(do: Do) -> None:
    create(do, "session")
    run_sweep(old_runs)
    do("DROP TABLE session")

    run_sweep(old_runs)

    assert not TableSize.select().where(TableSize.table_name == "session").exists()


def test_oldest_stale_row_is_that_of_the_last_run(do: Do, locked: Locked) -> None:
    create(do, "session")
    do("INSERT INTO session VALUES (1, '2020-01-01 00:00+00'), (2, '2021-01-01 00:00+00')")

    with locked("SELECT FROM session WHERE id = 2 FOR UPDATE"):
        run_sweep(changed(SESSIONS, first_run=False))

    assert covered([SESSIONS])["session"].oldest_at == datetime(2021, 1, 1, tzinfo=UTC)


def test_exclusively_locked_table_has_no_size_and_delays_nothing(do: Do, locked: Locked) -> None:
    create(do, "session", "country")

    with locked("LOCK TABLE session IN ACCESS EXCLUSIVE MODE"):
        found = covered([SESSIONS])

    assert (found["session"].bytes, found["session"].state) == (None, "swept")
    assert found["country"].bytes == 8192


def test_ledger_need_not_exist(do: Do, settings: Settings) -> None:
    create(do, "session")
    for model in (TableSize, Run):
        model.drop_table()

    assert covered([SESSIONS])["session"].growth_bytes_per_day is None


def rows_read(sql_rows: Callable[[str], list[Any]]) -> list[str]:
    """Return the tables of which a row was ever read, by PostgreSQL's statistics."""
    read = "SELECT relname FROM pg_stat_user_tables WHERE relname LIKE 'table\\_%' AND "
    return [name for (name,) in sql_rows(f"{read} seq_tup_read + coalesce(idx_tup_fetch, 0) > 0")]


def test_500_tables_need_as_many_statements_as_one_and_no_row_is_read(
    do: Do, admin: Connection, statements: list[str]
) -> None:
    numbers = range(500)
    do(";".join(f"CREATE TABLE table_{n} (id integer PRIMARY KEY, at timestamptz)" for n in numbers))
    do(";".join(f"INSERT INTO table_{n} SELECT generate_series(1, 10), now()" for n in numbers))
    sweeps = [sweep(f"shop.sweep_{n}", f"table_{n}") for n in range(100)]
    kept = [Kept(f"table_{n}", "reference data") for n in range(100, 499)]

    def ask(query: str) -> list[Any]:
        with admin.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())

    sent = []
    for some, others in ((sweeps[:1], kept[:1]), (sweeps, kept)):
        statements.clear()
        tables = covered(some, others)
        sent.append(len(statements))
    database.execute_sql("SELECT * FROM table_499")  # what the statistics are known to show
    database.close()  # a session reports its statistics at its end
    until(lambda: "table_499" in rows_read(ask))

    assert [each.table for each in tables.values() if each.state == "undecided"] == ["table_499"]
    assert sent[0] == sent[1]
    assert rows_read(ask) == ["table_499"]


def test_module_declares_kept_tables_with_or_without_sweeps() -> None:
    module = ModuleType("shop.kept")
    module.__dict__["KEPT"] = (Kept("country", "reference data"),)

    family = family_of(module)

    assert (family.sweeps, family.kept) == ((), (Kept("country", "reference data"),))


def test_setting_declares_kept_tables() -> None:
    settings = Settings(kept={"country": "reference data"})

    assert kept_tables(settings) == [Kept("country", "reference data")]


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ({"a b": "log"}, "HOUSEKEEPING_KEPT: Kept: 'a b' is no name of a table"),
        ({"country": " "}, "HOUSEKEEPING_KEPT: Kept('country') has no reason"),
    ],
)
def test_wrong_kept_table_is_refused(kept: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        kept_tables(Settings(kept=kept))

    assert text in str(refused.value)


def people(do: Do) -> None:
    do(
        "CREATE TABLE person (id integer PRIMARY KEY);"
        "CREATE TABLE visit (id integer PRIMARY KEY, person_id integer REFERENCES person);"
        "CREATE TABLE comment (id integer PRIMARY KEY, author_id integer REFERENCES person, at timestamptz);"
        "CREATE TABLE invoice (id integer PRIMARY KEY, person_id integer REFERENCES person ON DELETE SET NULL)"
    )


def test_table_that_a_subject_decides_about_is_swept_or_kept_by_it(do: Do) -> None:
    people(do)
    decisions: Any = {"visit": Delete(), "comment": Anonymise(author_id=None), "invoice": Keep("tax law")}

    found = covered(subjects=[Subject("customer", "person", tables=decisions)])

    assert {name: (found[name].state, found[name].by, found[name].reason) for name in ("person", *decisions)} == {
        "person": ("swept", ("customer",), None),
        "visit": ("swept", ("customer",), None),
        "comment": ("swept", ("customer",), None),
        "invoice": ("swept", ("customer",), None),
    }


def test_table_that_a_subject_keeps_unchanged_is_kept_for_its_reason(do: Do) -> None:
    do("CREATE TABLE person (id integer PRIMARY KEY); CREATE TABLE audit (id integer PRIMARY KEY, person_id integer)")
    link = Reference("audit.person_id", "person.id")

    found = covered(subjects=[Subject("customer", "person", tables={"audit": Keep("a log")}, references=[link])])

    assert (found["audit"].state, found["audit"].by, found["audit"].reason) == ("kept", (), "customer: a log")


def test_tables_of_a_refused_subject_are_undecided(do: Do) -> None:
    people(do)

    found = covered(subjects=[Subject("customer", "person", tables={"visit": Delete()})])

    assert {found[name].state for name in ("person", "visit", "comment", "invoice")} == {"undecided"}
    assert str(found["person"].reason).startswith("subject customer is refused: 2 links without a decision")
