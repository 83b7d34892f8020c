from __future__ import annotations

import itertools
from typing import Any

import dramatiq
import peewee
import pytest
from dramatiq import Actor

from housekeeping import Settings, read_database
from tests.integration.database.replicas.conftest import Application, MakeApplication
from tests.integration.database.replicas.standby import Standby
from tests.internals.database import Replicas, WalPosition, close_databases, data_consistency_used, database


def declared(application: Application, seen: list[Any], **options: Any) -> Actor[[], None]:
    """An actor that notes which notes it sees."""

    @dramatiq.actor(broker=application.broker, actor_name="look", max_retries=0, **options)
    def look() -> None:
        seen.append(notes(read_database()))

    return look


def notes(place: Any) -> list[str]:
    return [note for (note,) in place.execute_sql("SELECT note FROM notes ORDER BY note").fetchall()]


def far_ahead(application: Application) -> WalPosition:
    """A position that no replica will have replayed in this test's time."""
    position = application.position()
    return WalPosition(position.system, position.timeline, position.lsn + 2**40)


@pytest.mark.parametrize("consistency", ["sticky", "delayed"])
def test_a_replica_that_has_caught_up_is_read_from(
    make_application: MakeApplication, standby: Standby, consistency: str
) -> None:
    application, seen = make_application(standby.url), list[Any]()
    look = declared(application, seen, data_consistency=consistency)
    application.write("before it was sent")

    look.send()
    standby.catch_up(application.primary)

    assert (application.run(), seen) == ("replica", [["before it was sent"]])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"data_consistency": "always"}, {}], ids=["always", "unsaid"])
def test_other_actors_read_from_the_primary_and_carry_no_position(
    make_application: MakeApplication, standby: Standby, options: dict[str, str]
) -> None:
    application, seen = make_application(standby.url), list[Any]()
    message = declared(application, seen, **options).send()

    assert (application.run(), seen) == ("primary", [[]])
    assert "database_position" not in message.options


def test_sticky_message_reads_from_the_primary_if_replicas_lag(
    make_application: MakeApplication, standby: Standby
) -> None:
    application, seen = make_application(standby.url), list[Any]()
    look = declared(application, seen, data_consistency="sticky")
    standby.hold_up()
    application.write("before it was sent")

    look.send()

    assert (application.run(), seen) == ("primary", [["before it was sent"]])


def test_delayed_message_is_requeued_once_and_then_reads_from_the_primary(
    make_application: MakeApplication, standby: Standby
) -> None:
    application, seen = make_application(standby.url), list[Any]()
    look = declared(application, seen, data_consistency="delayed")
    standby.hold_up()
    application.write("before it was sent")
    look.send()

    application.step_worker.run()
    assert (application.step_worker.fetch(), seen) == (None, []), "put back before anything is done"
    application.step_worker.come_due()
    message = application.step_worker.fetch()

    assert message is not None and "retries" not in message.options
    assert (application.run(message), seen) == ("primary", [["before it was sent"]])


@pytest.mark.slow
def test_delayed_message_reads_from_a_replica_that_caught_up_meanwhile(
    make_application: MakeApplication, standby: Standby
) -> None:
    application, seen = make_application(standby.url), list[Any]()
    look = declared(application, seen, data_consistency="delayed")
    standby.hold_up()
    application.write("before it was sent")
    look.send()
    application.step_worker.run()

    standby.catch_up(application.primary)
    application.step_worker.come_due()

    assert (application.run(), seen) == ("replica", [["before it was sent"]])


@pytest.mark.slow
def test_a_replica_that_lags_is_waited_for(make_application: MakeApplication, standby: Standby) -> None:
    application = make_application(standby.url)
    standby.hold_up()
    application.write("new")
    position = application.position()
    replicas = Replicas([standby.url], clock=lambda: 0.0)

    found = replicas.caught_up(position, lambda _: standby.catch_up(application.primary))

    assert found.replica is replicas._all[0]
    found.replica.close()


@pytest.mark.slow
@pytest.mark.parametrize(("after_s", "pauses"), [(0.499, 2), (0.5, 1), (0.501, 1)])
def test_a_replica_is_waited_for_no_longer_than_half_a_second(
    make_application: MakeApplication, standby: Standby, after_s: float, pauses: int
) -> None:
    ahead, paused, now = far_ahead(make_application(standby.url)), list[float](), [0.0]
    replicas = Replicas([standby.url], clock=lambda: now[0])

    def pause(seconds: float) -> bool:
        paused.append(seconds)
        now[0] = after_s
        return len(paused) == 2

    found = replicas.caught_up(ahead, pause)

    assert (found.replica, found.lagging, len(paused)) == (None, True, pauses)
    replicas._all[0].close()


@pytest.mark.slow
def test_stopping_process_does_not_wait_for_a_replica(make_application: MakeApplication, standby: Standby) -> None:
    ahead, pauses = far_ahead(make_application(standby.url)), list[float]()
    replicas = Replicas([standby.url], clock=itertools.count(step=0.01).__next__)

    def told_to_stop(seconds: float) -> bool:
        pauses.append(seconds)
        return True

    assert replicas.caught_up(ahead, told_to_stop).lagging
    assert len(pauses) == 1
    replicas._all[0].close()


@pytest.mark.slow
def test_replicas_take_turns_and_one_that_caught_up_comes_first(
    make_application: MakeApplication, standby: Standby, doomed_standby: Standby
) -> None:
    application = make_application(standby.url)
    replicas = Replicas([standby.url, doomed_standby.url])
    position = application.position()
    for each in (standby, doomed_standby):
        each.catch_up(application.primary)

    turns = [replicas.caught_up(position, lambda _: None).replica for _ in range(4)]
    standby.hold_up()
    application.write("new")
    newer = application.position()
    doomed_standby.catch_up(application.primary)
    later = {replicas.caught_up(newer, lambda _: None).replica for _ in range(2)}

    first, second = replicas._all
    assert (turns, later) == ([first, second, first, second], {second})
    for replica in replicas._all:
        replica.close()


@pytest.mark.slow
def test_within_a_transaction_the_primary_is_read(make_application: MakeApplication, standby: Standby) -> None:
    application, seen = make_application(standby.url), list[Any]()

    @dramatiq.actor(broker=application.broker, data_consistency="sticky", max_retries=0)
    def look() -> None:
        with database.atomic():
            database.execute_sql("INSERT INTO notes VALUES ('its own')")
            seen.append(notes(read_database()))

    look.send()
    standby.catch_up(application.primary)

    assert (application.run(), seen) == ("primary", [["its own"]])


@pytest.mark.slow
def test_a_run_that_read_nothing_used_no_replica(make_application: MakeApplication, standby: Standby) -> None:
    application = make_application(standby.url)

    @dramatiq.actor(broker=application.broker, data_consistency="sticky", max_retries=0)
    def look() -> None: ...

    look.send()
    standby.catch_up(application.primary)

    assert application.run() == "primary"
    assert application.consistency._replicas._all[0].is_closed()


@pytest.mark.slow
def test_outside_of_messages_the_primary_is_read(make_application: MakeApplication, standby: Standby) -> None:
    application, kept = make_application(standby.url), list[Any]()

    @dramatiq.actor(broker=application.broker, data_consistency="sticky", max_retries=0)
    def keep() -> None:
        kept.append(read_database())

    keep.send()
    standby.catch_up(application.primary)
    application.run()
    standby.hold_up()
    application.write("after the message")

    assert read_database() is database.obj
    assert notes(kept[0]) == ["after the message"], "a handle kept longer than its message"
    assert data_consistency_used() == "primary"


@pytest.mark.slow
def test_nothing_is_written_to_a_promoted_replica(make_application: MakeApplication, doomed_standby: Standby) -> None:
    application, refused = make_application(doomed_standby.url), list[Exception]()

    @dramatiq.actor(broker=application.broker, data_consistency="sticky", max_retries=0)
    def write() -> None:
        place = read_database()
        notes(place)
        doomed_standby.promote()
        try:
            place.execute_sql("INSERT INTO notes VALUES ('astray')")
        except peewee.PeeweeException as error:
            refused.append(error)

    write.send()
    doomed_standby.catch_up(application.primary)
    application.run()

    assert "read-only transaction" in str(refused[0])


@pytest.mark.slow
@pytest.mark.one_database_only(reason="it configures several databases itself")
@pytest.mark.parametrize("held_up", [False, True])
def test_replica_of_another_database_is_read_once_it_has_caught_up(
    make_application: MakeApplication, standby: Standby, settings: Settings, held_up: bool
) -> None:
    schema = f"&options=-csearch_path%3D{settings.namespace}"
    own = {"databases": {"ci": settings.require_database_url()}, "replica_urls": {"ci": (standby.url + schema,)}}
    application, seen = make_application(**own), list[Any]()

    @dramatiq.actor(broker=application.broker, actor_name="look", max_retries=0, data_consistency="sticky")
    def look() -> None:
        seen.append((notes(read_database("ci")), data_consistency_used(), read_database() is database.obj))

    application.write("before it was sent")
    message = look.send()
    if held_up:
        standby.hold_up()
    application.write("before it read")
    used = application.run()
    for positions, replicas in application.consistency._others.values():
        positions.close()
        for replica in replicas._all:
            replica.close()
    close_databases()

    source = "primary" if held_up else "replica"
    assert (used, seen) == (source, [(["before it read", "before it was sent"], source, True)])
    assert "database_position" not in message.options
