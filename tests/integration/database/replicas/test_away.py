from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import dramatiq
import psycopg2
import pytest
import redis
from dramatiq import Actor

from housekeeping import Settings, read_database
from tests.faults import exchanges, lose_connection
from tests.integration.database.replicas.conftest import Application, MakeApplication
from tests.integration.database.replicas.standby import Standby
from tests.internals.database import Replicas, WalPosition, WalPositionReader, database
from tests.internals.middleware import DataConsistency, position_prefix

LEFT_ALONE = "Replica skipped for a minute"
NOWHERE = f"postgresql://postgres@/postgres?host={quote('/nonexistent', safe='')}"


def declared(application: Application, seen: list[Any], consistency: str = "sticky", **options: Any) -> Actor[[], None]:
    @dramatiq.actor(
        broker=application.broker, actor_name="look", max_retries=0, data_consistency=consistency, **options
    )
    def look() -> None:
        seen.append(read_database().execute_sql("SELECT count(*) FROM notes").fetchone()[0])

    return look


def read_once(application: Application, standby: Standby, body: Callable[[Any], None]) -> None:
    """Run an actor that gets the standby's database, which has caught up before."""

    @dramatiq.actor(broker=application.broker, max_retries=0, data_consistency="sticky")
    def look() -> None:
        body(read_database())

    look.send()
    standby.catch_up(application.primary)
    application.run()


@pytest.mark.parametrize("consistency", ["sticky", "delayed"])
def test_unavailable_replica_costs_one_warning_and_the_primary_is_read(
    make_application: MakeApplication, consistency: str
) -> None:
    application, seen = make_application(NOWHERE), list[Any]()
    look = declared(application, seen, consistency)
    application.write("one")

    used = [(look.send(), application.run())[1] for _ in range(2)]

    assert (used, seen) == (["primary", "primary"], [1, 1])
    assert len(application.lines(LEFT_ALONE)) == 1


def test_a_replica_that_is_away_is_warned_of_once_a_minute(make_application: MakeApplication) -> None:
    application, now = make_application(NOWHERE), [0.0]
    position, replicas = application.position(), Replicas([NOWHERE], clock=lambda: now[0])

    warned = []
    for now[0] in (0.0, 59.9, 60.0, 119.9, 120.0):
        replicas.caught_up(position, lambda _: None)
        warned.append(len(application.lines(LEFT_ALONE)))

    assert warned == [1, 1, 2, 2, 3]


@contextmanager
def hanging_up(first: Callable[[], object]) -> Iterator[str]:
    """A server that calls a function for each connection, and closes it; yields its address."""

    class HangUp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            first()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"postgresql://postgres@127.0.0.1:{server.server_address[1]}/postgres?sslmode=disable&gssencmode=disable"
        server.shutdown()
        thread.join()


def test_skipped_replica_is_not_queried(make_application: MakeApplication) -> None:
    position, now, tries = make_application(NOWHERE).position(), [0.0], set[float]()
    with hanging_up(lambda: tries.add(now[0])) as address:
        replicas = Replicas([address], clock=lambda: now[0])

        for now[0] in (0.0, 59.9, 60.0):
            replicas.caught_up(position, lambda _: None)

    assert tries == {0.0, 60.0}


def test_concurrent_failures_of_a_replica_are_logged_once(make_application: MakeApplication) -> None:
    application, meeting = make_application(NOWHERE), threading.Barrier(2, timeout=20)
    position = application.position()
    with hanging_up(meeting.wait) as address:
        replicas = Replicas([address])
        threads = [threading.Thread(target=replicas.caught_up, args=(position, lambda _: None)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert not meeting.broken
    assert len(application.lines(LEFT_ALONE)) == 1


def test_a_promoted_replica_is_not_read_from(make_application: MakeApplication, doomed_standby: Standby) -> None:
    application, seen = make_application(doomed_standby.url), list[Any]()
    look = declared(application, seen)
    look.send()
    doomed_standby.catch_up(application.primary)
    doomed_standby.promote()

    assert (application.run(), seen) == ("primary", [0])
    assert [line["reason"] for line in application.lines(LEFT_ALONE)] == ["it is no replica"]


def test_a_replica_that_is_killed_costs_no_message(make_application: MakeApplication, doomed_standby: Standby) -> None:
    application, seen = make_application(doomed_standby.url), list[Any]()
    look = declared(application, seen)
    for _ in range(2):
        look.send()
    doomed_standby.catch_up(application.primary)
    before = application.run()

    doomed_standby.kill()
    application.write("only the primary has it")

    assert (before, application.run(), seen) == ("replica", "primary", [0, 1])


def test_restarted_replica_is_checked_before_it_is_read(
    make_application: MakeApplication, doomed_standby: Standby
) -> None:
    application, seen = make_application(doomed_standby.url), list[Any]()

    def look(place: Any) -> None:
        seen.append(place.execute_sql("SELECT pg_is_in_recovery()").fetchone()[0])
        doomed_standby.kill()
        doomed_standby.start()
        seen.append(place.execute_sql("SELECT pg_is_in_recovery()").fetchone()[0])

    read_once(application, doomed_standby, look)

    assert seen == [True, False]


def test_statement_on_a_killed_replica_is_repeated_on_the_primary(
    make_application: MakeApplication, doomed_standby: Standby
) -> None:
    application, seen = make_application(doomed_standby.url), list[Any]()

    @dramatiq.actor(broker=application.broker, max_retries=0, data_consistency="sticky")
    def look() -> None:
        place = read_database()
        in_replica = "CASE WHEN pg_is_in_recovery() THEN pg_sleep(60)::text END"
        seen.append(place.execute_sql(f"SELECT count(*), {in_replica} FROM notes").fetchone()[0])
        seen.append(place.execute_sql("SELECT pg_is_in_recovery()").fetchone()[0])

    def kill_it_at_work() -> None:
        doomed_standby.ask("SELECT true")
        doomed_standby._eventually(lambda: doomed_standby.ask(at_work))
        doomed_standby.kill()

    at_work = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    application.write("one")
    look.send()
    doomed_standby.catch_up(application.primary)
    killer = threading.Thread(target=kill_it_at_work)
    killer.start()
    application.run()
    killer.join()

    assert (seen, len(application.lines(LEFT_ALONE))) == ([1, False], 1)


def test_run_continues_on_the_primary_after_a_replay_conflict(
    make_application: MakeApplication, standby: Standby
) -> None:
    application, seen = make_application(standby.url), list[Any]()
    conflict = "RAISE EXCEPTION USING ERRCODE = 'serialization_failure'"  # as PostgreSQL reports one

    def look(place: Any) -> None:
        for statement in (f"DO $$ BEGIN IF pg_is_in_recovery() THEN {conflict}; END IF; END $$", "SELECT 1"):
            place.execute_sql(statement)
            seen.append(place.execute_sql("SELECT pg_is_in_recovery()").fetchone()[0])

    read_once(application, standby, look)

    assert seen == [False, False], "never older than what was read before"


def test_timed_out_statement_is_not_repeated_on_the_primary(
    make_application: MakeApplication, standby: Standby
) -> None:
    application, codes = make_application(standby.url), list[Any]()

    def look(place: Any) -> None:
        place.execute_sql("SELECT set_config('statement_timeout', '10ms', false)")
        try:
            place.execute_sql("SELECT pg_sleep(60)")
        except Exception as error:
            codes.append(getattr(error, "orig", None))

    read_once(application, standby, look)

    assert isinstance(codes[0], psycopg2.errors.QueryCanceled)
    assert application.lines(LEFT_ALONE) == []


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"timeline": 2}, "it is on another timeline"),
        ({"system": "7000000000000000000"}, "it is a replica of another database"),
    ],
)
def test_a_replica_of_another_timeline_or_database_is_not_read_from(
    make_application: MakeApplication, standby: Standby, other: dict[str, Any], reason: str
) -> None:
    application = make_application(standby.url)
    position = application.position()
    standby.catch_up(application.primary)
    elsewhere = WalPosition(**{"system": position.system, "timeline": position.timeline, "lsn": position.lsn, **other})
    replicas = Replicas([standby.url])

    found = replicas.caught_up(elsewhere, lambda _: None)

    assert (found.replica, found.lagging) == (None, False)
    assert [line["reason"] for line in application.lines(LEFT_ALONE)] == [reason]
    replicas._all[0].close()


def test_the_primary_itself_is_no_replica(make_application: MakeApplication, settings: Settings) -> None:
    assert settings.database_url is not None
    application = make_application(settings.database_url.partition("&")[0])
    declared(application, []).send()

    assert application.run() == "primary"
    assert [line["reason"] for line in application.lines(LEFT_ALONE)] == ["it is no replica"]


def test_a_connection_left_inside_a_transaction_is_closed(make_application: MakeApplication, standby: Standby) -> None:
    application, seen = make_application(standby.url), list[Any]()

    def leave(place: Any) -> None:
        place.connection().cursor().execute("BEGIN")
        seen.append(place)

    read_once(application, standby, leave)

    assert seen[0].is_closed()


def test_without_an_answer_about_dropped_duplicates_the_primary_is_read(
    make_application: MakeApplication, standby: Standby, settings: Settings
) -> None:
    application, seen = make_application(standby.url), list[Any]()
    look = declared(application, seen, idempotent=True)
    look.send()
    standby.catch_up(application.primary)

    with exchanges() as made:
        made.whenever(["\r\nGET\r\n", position_prefix(settings.namespace)], "before", lose_connection)
        used = application.run()

    assert (used, seen) == ("primary", [0])


def test_message_is_sent_while_the_primary_is_away(
    make_application: MakeApplication, standby: Standby, redis_client: redis.Redis, settings: Settings
) -> None:
    application, seen, now = make_application(standby.url), list[Any](), [0.0]
    positions, middleware = WalPositionReader(NOWHERE, clock=lambda: now[0]), application.broker.middleware
    own = DataConsistency(redis_client, settings.namespace, positions, Replicas([standby.url]))
    middleware[middleware.index(application.consistency)] = own
    look = declared(application, seen)

    sent = [look.send() for now[0] in (0.0, 59.9, 60.0)]
    standby.catch_up(application.primary)

    assert ["database_position" in message.options for message in sent] == [False, False, False]
    assert len(application.lines("Messages are sent without a position")) == 2
    assert application.run() == "primary"


def test_a_message_sent_within_a_transaction_reads_from_the_primary(
    make_application: MakeApplication, standby: Standby
) -> None:
    application, seen = make_application(standby.url), list[Any]()
    look = declared(application, seen)

    with database.atomic():
        database.execute_sql("INSERT INTO notes VALUES ('not committed when it was sent')")
        look.send()
        standby.catch_up(application.primary)

    assert (application.run(), seen) == ("primary", [1])
