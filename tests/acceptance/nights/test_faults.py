"""The questions of a night, answered after a fault of one worker, of PostgreSQL, or of a table."""

from __future__ import annotations

from contextlib import closing
from typing import Final

import psycopg2

from tests.acceptance.nights.questions import (
    AT,
    CATCH_UP,
    DELETED,
    LEASE,
    ROW,
    SAFE,
    SINCE,
    SLOWER,
    STUCK,
    SUFFERS,
    TICK,
    TREND,
    UNDO,
    WORKER,
    Answer,
    State,
    each_answer_of,
)
from tests.acceptance.nights.shop import CALLS, ORDERS, Night
from tests.acceptance.processes import Process, eventually

#: Who locks the table, by whatever a person needs to end it.
_BY_SESSION: Final = (
    r".?orders.? is locked by process {session} of PostgreSQL \(migration, \w+\), idle in transaction: "
    "its transaction is open for .* ALTER TABLE orders ADD COLUMN note text"
)
_READ_ONLY: Final = "PostgreSQL, database main rejects writes: it is read-only: use the URL of the primary"
_BAD_VALUE: Final = 'invalid input syntax for type integer: "one week"'

#: The backlog cannot be counted now, so that the last count is shown with its age.
_EARLIER_TREND: Final = Answer(
    (rf"{ORDERS} +\w+ ! +\d+ \(\S+ \w+ ago\)",),
    (r"Backlog \d+ \( \S+ \w+ ago \)", r"Rows per hour [\d,]+ processed, [\d,]+ arrived"),
)
_UNDO_OF_CUT_RUN: Final = Answer(
    (r"undo: these archived rows can be restored: {cut_rows} of \S*orders: housekeeping restore {cut_run}\n",),
    (r"can be restored: {cut_rows} of \S*orders housekeeping restore {cut_run}\b",),
    type=(f"runs {ORDERS}", "runs {cut_run}"),
    look=("/", WORKER, "/runs/{cut_run}"),
)


def _in_the_middle_of_a_run(shop: Night, *processes: Process) -> None:
    """Return when a run of the orders has committed a batch and is at work on the next one."""
    shop.slow_down_orders()
    shop.add_orders(300)
    shop.put(ORDERS, min_backoff=200, max_backoff=1000)
    begun = (
        f"SELECT max(id) FROM {shop.ledger}.runs WHERE worker = '{ORDERS}' AND outcome IS NULL AND cursor IS NOT NULL"
    )
    eventually(lambda: shop.value(begun), *processes)
    shop.values["cut_run"] = str(shop.value(begun))


def _know_rows_of_the_cut_run(shop: Night) -> None:
    counts = f"SELECT counts ->> 'archived_rows' FROM {shop.ledger}.runs WHERE id = {shop.values['cut_run']}"
    shop.values["cut_rows"] = str(shop.value(counts))


def _worker_killed(shop: Night) -> None:
    worker, scheduler = shop.start_idle(threads=2)
    shop.put(CALLS)
    eventually(lambda: shop.value(f"SELECT max(id) FROM {shop.ledger}.runs WHERE outcome IS NULL"), worker)
    _in_the_middle_of_a_run(shop, worker)
    worker.kill()
    # PostgreSQL completes the statement of a dead client.
    eventually(lambda: not shop.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"))
    _know_rows_of_the_cut_run(shop)
    # As if that was 80 seconds ago.
    shop.sql(f"UPDATE {shop.ledger}.runs SET heartbeat_at = heartbeat_at - interval '80 s' WHERE outcome IS NULL")
    shop.status_says("no worker serves the queue", scheduler)
    last_tick = f"SELECT max(tick) FROM {shop.ledger}.runs WHERE worker = '{ORDERS}'"
    shop.sql(f"DELETE FROM {shop.ledger}.runs WHERE tick = ({last_tick}) AND outcome IS NOT NULL")


def _postgres_restarted(shop: Night) -> None:
    worker, scheduler = shop.start_idle()
    _in_the_middle_of_a_run(shop, worker)
    shop.look("/")
    shop.servers.restart("postgres")
    shop.connect()
    shop.sql("DROP TRIGGER slow ON orders")
    is_open = f"SELECT outcome IS NULL FROM {shop.ledger}.runs WHERE id = {shop.values['cut_run']}"
    eventually(lambda: not shop.value(is_open) and not shop.value("SELECT count(*) FROM orders"), worker, scheduler)
    _know_rows_of_the_cut_run(shop)


def _wait_for_failed_run(shop: Night, worker: Process) -> None:
    failed = f"SELECT count(*) FROM {shop.ledger}.runs WHERE worker = '{ORDERS}' AND outcome = 'failed'"
    eventually(lambda: shop.value(failed), worker)


def _table_locked(shop: Night) -> None:
    worker, _ = shop.start_idle()
    shop.add_orders(300)
    session = shop.stack.enter_context(closing(psycopg2.connect(shop.admin.dsn, application_name="migration")))
    with session.cursor() as cursor:
        cursor.execute(f"SET search_path TO {shop.settings.namespace}")
        cursor.execute("ALTER TABLE orders ADD COLUMN note text")
    shop.values["session"] = str(session.info.backend_pid)
    shop.put(ORDERS)
    _wait_for_failed_run(shop, worker)


def _predicate_fails(shop: Night) -> None:
    worker, _ = shop.start_idle()
    shop.add_orders(300)
    shop.sql("INSERT INTO orders (expires_at, grace) VALUES (now() - interval '60 days', 'one week')")
    shop.values["bad_row"] = str(shop.value("SELECT max(id) FROM orders"))
    shop.put(ORDERS)
    _wait_for_failed_run(shop, worker)


def _postgres_read_only(shop: Night) -> None:
    worker, scheduler = shop.start_idle()
    shop.add_orders(300)
    shop.sql("SET default_transaction_read_only = off", "ALTER SYSTEM SET default_transaction_read_only = on")
    shop.stack.callback(shop.sql, "ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()")
    shop.sql("SELECT pg_reload_conf()")
    shop.status_says("Unavailable", worker, scheduler)


STATES: Final = (
    State(
        "a read-only PostgreSQL",
        _postgres_read_only,
        {
            STUCK: Answer(
                (
                    rf"^Unavailable: PostgreSQL, database main, since {AT}, .* repair what its error names",
                    f"UNAVAILABLE {_READ_ONLY}",
                    rf"(?m)^{ORDERS} .* 300 ",
                ),
                (rf"Unavailable: PostgreSQL, database main, since {AT}", _READ_ONLY, " 300 "),
                ("All right", "not shown", "No worker", "No scheduler"),
            ),
            SAFE: Answer(
                ("a run now would fail", "PostgreSQL rejects writes: it is read-only"),
                ("would fail", "PostgreSQL rejects writes: it is read-only"),
                ("would start",),
            ),
            # Nothing can be changed.
            SLOWER: Answer((_READ_ONLY,), ("Narrow",)),
        },
    ),
    State(
        "a worker killed",
        _worker_killed,
        {
            STUCK: Answer(
                (
                    r"^No worker: cronjob, since .* Start housekeeping worker",
                    r"(?m)^\S+:\d+ +worker +dead\? no heartbeat for",
                    rf"(?m)^{ORDERS} .* lost\? no heartbeat for \S+ min",
                ),
                ("No worker: cronjob, since .* Start housekeeping worker", r"lost\? no heartbeat for \S+ min"),
                ("All right",),
            ),
            CATCH_UP: Answer(
                (r"backlog: \d+ rows, and it will not catch up: no worker serves the queue 'cronjob'",),
                (r"Forecast \d+ rows, and it will not catch up: no worker serves the queue 'cronjob'",),
                ("done at about",),
                type=(f"plan {ORDERS}",),
                look=("/", WORKER),
            ),
            SAFE: Answer(
                ("a run now would wait", "no worker serves the queue 'cronjob' since .*: start `housekeeping worker`"),
                (
                    "[Aa] run now would wait",
                    "no worker serves the queue 'cronjob' since .*: start `housekeeping worker`",
                ),
                ("would start",),
            ),
            DELETED: Answer(
                (f"run {{cut_run}} of {ORDERS}: lost", "deleted_rows {cut_rows}, archived_rows {cut_rows}"),
                (f"Run {{cut_run}} of {ORDERS}", "lost\\?", "deleted_rows {cut_rows}", "archived_rows {cut_rows}"),
                type=(f"runs {ORDERS}", "runs {cut_run}"),
                look=("/", WORKER, "/runs/{cut_run}"),
            ),
            UNDO: _UNDO_OF_CUT_RUN,
            LEASE: Answer(
                (rf"{CALLS} +{CALLS} on \S+:\d+ .* no heartbeat for \S+ min: the next run takes over",),
                (rf"Leases.* {CALLS} on \S+:\d+ .* no heartbeat for \S+ min: the next run takes over",),
            ),
            TICK: Answer(
                ("it was sent, but no worker serves the queue 'cronjob' since",),
                ("no worker serves the queue 'cronjob' since",),
                ("it is being sent",),
                type=(f"why {ORDERS}",),
                look=("/", WORKER, f"{WORKER}/plan"),
            ),
            SUFFERS: Answer(
                (rf"rows_per_s {ORDERS} +\? .*: lost\?", "waiting_locks +0 +10"),
                (rf"Rows/s of {ORDERS} run {{cut_run}}: lost\? no heartbeat for \S+ min unknown",),
                ("OVER", "over 1"),
            ),
        },
    ),
    State(
        "a locked table",
        _table_locked,
        {
            STUCK: Answer(
                (
                    rf"^Unreadable rows: {ORDERS}, since",
                    rf"(?m)^ALERT {ORDERS}: the backlog cannot be counted: {_BY_SESSION}",
                ),
                (rf"Unreadable rows: {ORDERS}, since", f"the backlog cannot be counted: {_BY_SESSION}"),
                ("All right", "Stuck run"),
            ),
            TREND: _EARLIER_TREND,
            CATCH_UP: Answer(
                ("backlog: the stale rows cannot be counted; when they will be done is unknown",),
                ("the stale rows cannot be counted.* could not be counted: canceling statement due to lock timeout",),
                ("nothing is stale", "done at about"),
                type=(f"plan {ORDERS}",),
                look=("/", WORKER, f"{WORKER}/plan"),
            ),
            SAFE: Answer(
                ("a run now would wait", f"locks +waits +{_BY_SESSION}"),
                ("[Aa] run now would wait", f"locks waits {_BY_SESSION}"),
                ("would start",),
            ),
            TICK: Answer(
                (
                    rf"{ORDERS}, tick ",
                    "it failed: canceling statement due to lock timeout",
                    f"locks +waits +{_BY_SESSION}",
                ),
                ("canceling statement due to lock timeout",),
                type=(f"why {ORDERS}",),
                look=("/", WORKER),
            ),
            ROW: Answer(
                ("canceling statement due to lock timeout",),
                ("canceling statement due to lock timeout",),
                type=("errors",),
                look=("/", "/errors"),
            ),
            # A run, and the count of the stale rows for status or page, may be waiting at this moment.
            SUFFERS: Answer(
                (r"waiting_locks +[0-2] +10", r'dead_rows "orders" +[\d,]+ +100,000'),
                (r"wait for locks on swept tables [0-2] 10\b", r"orders\W+[\d,]+ 100,000"),
                ("OVER", "over 1"),
            ),
        },
    ),
    State(
        "a predicate that fails",
        _predicate_fails,
        {
            STUCK: Answer(
                (
                    rf"^Unreadable rows: {ORDERS}, since",
                    rf"ALERT {ORDERS}: the backlog cannot be counted: {_BAD_VALUE}; housekeeping plan {ORDERS}",
                ),
                (rf"Unreadable rows: {ORDERS}, since", f"the backlog cannot be counted: {_BAD_VALUE}"),
                ("All right", "Stuck run"),
            ),
            TREND: _EARLIER_TREND,
            CATCH_UP: Answer(
                ("backlog: the stale rows cannot be counted; when they will be done is unknown",),
                (f"the stale rows cannot be counted.* the rows could not be counted: {_BAD_VALUE}",),
                ("nothing is stale", "done at about"),
                type=(f"plan {ORDERS}",),
                look=("/", WORKER, f"{WORKER}/plan"),
            ),
            SAFE: Answer(
                ("a run now would fail when it reaches the row",),
                ("run now would fail when it reaches the row",),
                ("would start",),
            ),
            TICK: Answer(
                (rf"{ORDERS}, tick ", f"it failed: {_BAD_VALUE}"),
                (_BAD_VALUE,),
                type=(f"why {ORDERS}",),
                look=("/", WORKER),
            ),
            ROW: Answer(
                (rf"fails for the row id {{bad_row}}: {_BAD_VALUE}",),
                (rf"fails for the row id {{bad_row}}: {_BAD_VALUE}",),
                type=("status", f"plan {ORDERS}"),
                look=("/", WORKER, f"{WORKER}/plan"),
            ),
        },
    ),
    State(
        "PostgreSQL restarted",
        _postgres_restarted,
        {
            STUCK: Answer(
                (rf"(?m)^{ORDERS} .* done",),
                (rf"{ORDERS} on done",),
                ("Stuck run", "UNAVAILABLE", "Unavailable", r"lost\?"),
            ),
            SINCE: Answer(
                (rf"result: PostgreSQL was restarted at {AT}, which ended its connection",),
                (rf"PostgreSQL was restarted at {AT}, which ended its connection",),
                type=(f"runs {ORDERS}", "runs {cut_run}"),
                look=("/", "/errors", "/runs/{cut_run}"),
            ),
            CATCH_UP: Answer(
                ("backlog: nothing is stale",), ("Backlog 0 ",), type=(f"plan {ORDERS}",), look=("/", WORKER)
            ),
            SAFE: Answer(("a run now would start",), ("run now would start",)),
            DELETED: Answer(
                (f"run {{cut_run}} of {ORDERS}: ", "deleted_rows {cut_rows}, archived_rows {cut_rows}"),
                (f"Run {{cut_run}} of {ORDERS}", "deleted_rows {cut_rows}", "archived_rows {cut_rows}"),
                type=(f"runs {ORDERS}", "runs {cut_run}"),
                look=("/", WORKER, "/runs/{cut_run}"),
            ),
            UNDO: _UNDO_OF_CUT_RUN,
            SUFFERS: Answer(
                (rf"PostgreSQL started {AT}, \S+ \w+ ago", "waiting_locks +0 +10"),
                (rf"PostgreSQL started {AT}, \S+ \w+ ago", r"wait for locks on swept tables 0 10\b"),
                ("OVER", "over 1"),
            ),
        },
    ),
)

test_answer_is_right_in_three_steps = each_answer_of(*STATES)
