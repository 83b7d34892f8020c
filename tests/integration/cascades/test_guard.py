"""The guard counts all tables of dependents, and stops a first run that would read a large one for each batch."""

from __future__ import annotations

from typing import Any

import pytest
from peewee import BigAutoField

from housekeeping import BaseModel, Delete, Guard, Rows, Settings, Sweep, UtcDateTimeField
from tests.integration.conftest import Do
from tests.internals.doctor import stages
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.ledger import Run


class Account(BaseModel):
    id = BigAutoField()
    closed_at = UtcDateTimeField()


def sweep_with(delete: Delete, **guard: Any) -> Sweep:
    rows = Rows(Account, stale=lambda row, now: row.closed_at < now, order="closed_at", action=delete)
    return Sweep("shop.closed_accounts", rows, guard=Guard(**guard))


closed = sweep_with(Delete(dependents=True))


@pytest.fixture
def do(do: Do) -> Do:
    do(
        "CREATE TABLE account (id bigint PRIMARY KEY, closed_at timestamptz NOT NULL);"
        "CREATE TABLE orders (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id) ON DELETE CASCADE);"
        "CREATE INDEX ON orders (account_id);"
        "INSERT INTO account SELECT n, '2026-01-01' FROM generate_series(1, 10) AS n;"
        "INSERT INTO account SELECT n, now() + interval '1 day' FROM generate_series(11, 99) AS n"
    )
    return do


def ended(sweep: Sweep = closed, **options: Any) -> tuple[str, str | None]:
    result = run_sweep(sweep, **options)
    return result.outcome, result.reason


@pytest.mark.parametrize(
    ("dependents", "others", "outcome"),
    [(999, 0, "done"), (1000, 0, "skipped"), (1000, 4000, "done"), (1001, 4000, "skipped")],
)
def test_first_run_over_a_fifth_of_a_table_of_dependents_is_skipped(
    do: Do, dependents: int, others: int, outcome: str
) -> None:
    do(f"INSERT INTO orders SELECT n, n % 10 + 1 FROM generate_series(1, {dependents}) AS n")
    do(f"INSERT INTO orders SELECT -n, n % 80 + 11 FROM generate_series(1, {others}) AS n")

    assert ended()[0] == outcome


def test_skipped_first_run_names_the_table_of_dependents(do: Do) -> None:
    do("INSERT INTO orders SELECT n, n % 10 + 1 FROM generate_series(1, 2000) AS n")

    text = str(plan(closed).unconfirmed)

    assert text.startswith(
        "2,000 of about 2,000 rows of orders are stale, over the first run's limit of 999, and no run"
    )
    assert (ended(), ended(confirmed=True)) == (("skipped", "unconfirmed"), ("done", None))


def test_rows_of_kept_dependents_do_not_count(do: Do) -> None:
    do("INSERT INTO orders SELECT n, n % 10 + 1 FROM generate_series(1, 2000) AS n")

    assert plan(sweep_with(Delete(dependents={"orders": "keep"}))).unconfirmed is None


@pytest.mark.parametrize("action", [Delete(dependents=True), Delete()])
def test_missing_index_of_a_large_table_stops_the_first_run(do: Do, action: Delete) -> None:
    do("INSERT INTO orders SELECT n, 50 FROM generate_series(1, 30000) AS n; DROP INDEX orders_account_id_idx")
    do("CREATE TABLE visit (id bigint PRIMARY KEY, account_id bigint REFERENCES account ON DELETE CASCADE)")
    do("INSERT INTO visit SELECT n, 50 FROM generate_series(1, 20000) AS n; ANALYZE orders, visit")
    sweep = sweep_with(action)

    stopped, text = ended(sweep), str(plan(sweep).unconfirmed)
    do("CREATE INDEX ON orders (account_id); CREATE INDEX ON visit (account_id)")

    assert stopped == ("skipped", "unconfirmed")
    assert text.startswith(
        "orders has about 30,000 rows and no index by which dependents are found, so that each batch would read all of "
        "it (CREATE INDEX CONCURRENTLY ON orders (account_id); CREATE INDEX CONCURRENTLY ON visit (account_id)), and "
        "no run of this worker has completed yet"
    )
    assert ended(sweep) == ("done", None)


NOTES = """
CREATE TABLE note (id bigint PRIMARY KEY, order_id bigint REFERENCES orders (id) ON DELETE CASCADE);
INSERT INTO orders VALUES (1, 1), (2, 50);
"""


def test_missing_index_of_a_large_table_at_any_depth_stops_the_first_run(do: Do) -> None:
    do(f"{NOTES}; INSERT INTO note SELECT n, 2 FROM generate_series(1, 30000) AS n; ANALYZE note")

    text = str(plan(closed).unconfirmed)

    assert text.startswith("note has about 30,000 rows and no index by which dependents are found")
    assert ended() == ("skipped", "unconfirmed")


def test_rows_of_a_table_at_any_depth_count(do: Do) -> None:
    do(f"{NOTES}; CREATE INDEX ON note (order_id); INSERT INTO note SELECT n, 1 FROM generate_series(1, 2000) AS n")

    assert str(plan(closed).unconfirmed).startswith("2,000 of about 2,000 rows of note are stale")
    assert ended() == ("skipped", "unconfirmed")


def test_missing_index_is_one_finding_of_doctor(do: Do) -> None:
    do("INSERT INTO orders SELECT n, 50 FROM generate_series(1, 30000) AS n; DROP INDEX orders_account_id_idx")

    found = [each for each in stages.examine_stages(Settings.load(), {closed.name: closed}) if "orders" in each.text]

    assert [(each.subject, each.way_out) for each in found] == [
        ("dependents of account", "CREATE INDEX CONCURRENTLY ON orders (account_id)")
    ]


def test_confirmed_run_does_without_the_index(do: Do) -> None:
    do("INSERT INTO orders SELECT n, 50 FROM generate_series(1, 30000) AS n; DROP INDEX orders_account_id_idx")

    assert ended(confirmed=True) == ("done", None)
    assert ended() == ("done", None)


PHOTOS = """
CREATE TABLE photo (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id) ON DELETE CASCADE);
CREATE INDEX ON photo (account_id);
INSERT INTO account SELECT n, '2026-01-01' FROM generate_series(101, 110) AS n;
"""


def test_new_table_is_named_by_plan_doctor_and_the_next_run(do: Do, caplog: pytest.LogCaptureFixture) -> None:
    ended()
    do(PHOTOS)

    planned = {each.link.table: each.is_new for each in plan(closed).dependents}
    found = stages.examine_stages(Settings.load(), {closed.name: closed})
    named = [each.text for each in found if "new since the last run" in each.text]
    caplog.clear()
    first, second = ended(), ended()

    assert planned == {"orders": False, "photo": True}
    assert (len(named), named[0].split(" ")[0]) == (1, "photo")
    assert (first, second) == (("done", None), ("done", None))
    logged = [vars(each)["text"] for each in caplog.records if each.message == "Deleted rows are referenced"]
    assert (len(logged), "photo" in logged[0]) == (1, True)


def test_rows_of_a_new_table_are_deleted_along(do: Do) -> None:
    ended()
    do(f"{PHOTOS}; INSERT INTO photo SELECT n, n FROM generate_series(101, 105) AS n")

    result = run_sweep(closed)

    assert (result.outcome, result.counts["deleted_rows"], result.counts["deleted_dependents"]) == ("done", 10, 5)


def test_new_table_with_many_dependents_needs_a_confirmation(do: Do) -> None:
    ended()
    do(f"{PHOTOS}; INSERT INTO photo SELECT n, n % 10 + 101 FROM generate_series(1, 2000) AS n")

    text = str(plan(closed).unconfirmed)

    assert "rows of photo are stale" in text
    assert "its predicate, its age or its table has changed since the last completed run" in text
    assert ended() == ("skipped", "unconfirmed")


def test_details_of_a_run_have_every_table_of_dependents(do: Do) -> None:
    ended()

    assert "orders" in Run.get().counts["details"]["dependents"]


@pytest.mark.parametrize(("share", "outcome"), [(0.7, "done"), (0.5, "failed")])
def test_breaker_counts_dependents(do: Do, share: float, outcome: str) -> None:
    do("INSERT INTO orders SELECT n, n % 10 + 1 FROM generate_series(1, 180) AS n")
    sweep = sweep_with(Delete(dependents=True), share=share, action="stop", first_run=False)

    assert ended(sweep)[0] == outcome


def test_reason_of_a_refused_run_is_logged_once(do: Do, caplog: pytest.LogCaptureFixture) -> None:
    do("CREATE TABLE invoice (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id))")
    caplog.set_level("INFO")

    run_sweep(closed)

    assert [each.message for each in caplog.records if "has no decision" in str(vars(each))] == ["Run ended"]


def test_undecided_link_fails_plan_run_and_doctor_before_any_change(do: Do) -> None:
    do("CREATE TABLE invoice (id bigint PRIMARY KEY, account_id bigint REFERENCES account (id))")

    result = run_sweep(closed)
    findings = stages.examine_stages(Settings.load(), {closed.name: closed})
    found = [each for each in findings if each.subject == "dependents"]

    assert (result.outcome, result.counts["deleted_rows"]) == ("failed", 0)
    assert "1 link has no decision: invoice.account_id" in str(result.error)
    assert getattr(result.error, "exit_code", None) == 2
    assert Account.select().count() == 99
    (finding,) = found
    assert (finding.level, finding.subject) == ("error", "dependents")
    assert finding.way_out is not None and finding.way_out.endswith('dependents={"invoice.account_id": "keep"}')
