"""Pings of the installation and of workers, received by a local server."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pendulum
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from pydantic import SecretStr

from housekeeping import Settings
from housekeeping.testing.stubs import ManualClock
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.acceptance.processes import SCHEDULER, WORKER, eventually, started
from tests.acceptance.queues import Queues
from tests.integration.metrics.pages import STATUSES
from tests.integration.metrics.receiver import PATIENCE_S, SECRET, Receiver, receiving
from tests.integration.middleware.applications import at, close_all, scheduler, wake_up
from tests.integration.sweeps.orders import Order, add, sweep
from tests.internals.core import PREFIX, SettingsError, pings
from tests.internals.database import Database
from tests.internals.engine import run_sweep


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Settings]]:
    """Return settings with these variables, whose URLs are pinged during the test."""

    def load(**variables: Any) -> Settings:
        for name, value in variables.items():
            monkeypatch.setenv(f"{PREFIX}{name}", value if isinstance(value, str) else json.dumps(value))
        settings = Settings.load()
        pings.use(settings)
        return settings

    yield load
    pings.use(Settings.model_construct(workers={}, ping_url=None))


@pytest.fixture
def orders(postgres: Database) -> None:
    postgres.create_tables([Order])
    add(1)


def nothing(order: Order) -> None: ...


def break_off(order: Order) -> None:
    raise ConnectionResetError("reset")


@pytest.mark.parametrize(("action", "path"), [(nothing, ""), (break_off, "/fail")])
def test_run_that_did_work_pings_its_workers_url(
    receiver: Receiver, orders: None, clock: ManualClock, use: Callable[..., Settings], action: Any, path: str
) -> None:
    declared = sweep(action)
    settings = use(PING_URL=f"{receiver.url}/installation", WORKERS={declared.name: {"ping_url": receiver.url}})

    run_sweep(declared.configured(settings.workers[declared.name]), clock=clock)

    assert receiver.next() == path and receiver.waiting() == []


def test_skipped_run_pings_nothing(
    receiver: Receiver, orders: None, clock: ManualClock, use: Callable[..., Settings]
) -> None:
    declared = sweep(nothing)
    settings = use(WORKERS={declared.name: {"ping_url": receiver.url, "enabled": False}})

    skipped = run_sweep(declared.configured(settings.workers[declared.name]), clock=clock)
    pings.send(declared.name, failed=True)

    assert skipped.outcome == "skipped"
    assert receiver.next() == "/fail" and receiver.waiting() == []


def test_fail_is_appended_to_the_path_before_a_query(receiver: Receiver, use: Callable[..., Settings]) -> None:
    use(PING_URL=f"{receiver.url}/?create=1")

    pings.send("", failed=True)

    assert receiver.next() == "/fail?create=1"


def test_unanswered_ping_is_repeated_once_and_logged_once_without_its_url(
    receiver: Receiver, use: Callable[..., Settings], caplog: pytest.LogCaptureFixture
) -> None:
    use(PING_URL=receiver.url)
    receiver.answers = [500, 503, 500, 503, 200, 404, 404]

    for _ in range(4):
        pings.send("", failed=False)
        receiver.next()
        pings.wait(PATIENCE_S)

    assert len(receiver.waiting()) == 3  # two repetitions before the answer and one after it
    said = [(record.getMessage(), vars(record)["reason"]) for record in caplog.records]
    assert said == [("Ping could not be sent", "status 503"), ("Ping could not be sent", "status 404")]
    assert SECRET not in caplog.text


def test_hanging_server_delays_no_caller_and_gets_one_request_at_once(
    receiver: Receiver, use: Callable[..., Settings]
) -> None:
    use(PING_URL=receiver.url)
    receiver.hangs = True
    pings.send("", failed=False)
    receiver.next()

    for number in range(1000):
        pings.send("", failed=number % 2 == 0)

    assert receiver.waiting() == []
    receiver.answer()
    # What is left is the last of each kind, in order.
    assert [receiver.next(), receiver.next()] == ["/fail", ""]
    pings.wait(PATIENCE_S)
    assert receiver.waiting() == [] and receiver.most_at_once == 1


def test_server_that_refuses_connections_costs_one_line(
    use: Callable[..., Settings], receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.close()
    use(PING_URL=receiver.url)

    for _ in range(3):
        pings.send("", failed=False)
        pings.wait(PATIENCE_S)

    [record] = caplog.records
    assert vars(record)["reason"] == "[Errno 111] Connection refused" and SECRET not in caplog.text


def test_answer_without_an_end_is_given_up(
    use: Callable[..., Settings], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("housekeeping.core.pings.TOTAL_S", 0.2)

    closing = threading.Event()

    class Endless(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while not closing.wait(0.01):  # slowly, so that no buffer fills
                    self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Endless) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        use(WORKERS={STATUSES: {"ping_url": f"http://127.0.0.1:{server.server_address[1]}"}})
        pings.send(STATUSES, failed=False)
        pings.wait(PATIENCE_S)
        closing.set()
        server.shutdown()
        serving.join()

    assert [record.getMessage() for record in caplog.records] == ["Ping could not be sent"]


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "https://", "https://host/a b", "https://host:port/x", "https://me:pw@host/x", "x", 5]
)
def test_wrong_url_is_rejected_and_not_shown(use: Callable[..., Settings], url: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        use(WORKERS={STATUSES: {"ping_url": url}})

    should = "text" if url == 5 else "a URL such as https://hc-ping.com/"
    assert str(refused.value).startswith(
        f'HOUSEKEEPING_WORKERS["{STATUSES}"]["ping_url"] is ***; it should be {should}'
    )


def test_url_is_in_no_text_of_the_settings(use: Callable[..., Settings], receiver: Receiver) -> None:
    settings = use(PING_URL=receiver.url, WORKERS={STATUSES: {"ping_url": receiver.url}})

    assert SECRET not in f"{settings!r} {settings.workers!r} {settings.model_dump()}"


def test_broken_setting_with_a_url_does_not_show_it(use: Callable[..., Settings], receiver: Receiver) -> None:
    with pytest.raises(SettingsError) as refused:
        use(WORKERS=f'{{"{STATUSES}": {{"ping_url": "{receiver.url}"')

    assert SECRET not in str(refused.value)


@pytest.fixture
def broker(settings: Settings, redis_client: redis.Redis, receiver: Receiver) -> Iterator[RedisBroker]:
    """Return a scheduler's broker whose installation is pinged."""
    given = settings.model_copy(update={"database_url": None, "ping_url": SecretStr(receiver.url)})
    yield scheduler(given)
    pings.use(Settings.model_construct(workers={}, ping_url=None))
    close_all()


def end_wake_up(broker: RedisBroker, now: Any) -> None:
    """Ask for the next wake-up, as periodiq does for each actor once it has sent what was due."""
    for actor in broker.actors.values():
        if "periodic" in actor.options:
            actor.options["periodic"].next_valid_date(pendulum.instance(now))


@pytest.mark.redis_broker_only(reason="it looks at Redis")
def test_each_wake_up_of_the_scheduler_pings_the_installation_once(broker: RedisBroker, receiver: Receiver) -> None:
    for minute in (0, 1):
        wake_up(broker, at(9, minute))
        assert receiver.waiting() == []
        end_wake_up(broker, at(9, minute))
        end_wake_up(broker, at(9, minute))
        assert receiver.next() == ""
        pings.wait(PATIENCE_S)

    assert receiver.waiting() == []


@pytest.mark.redis_broker_only(reason="it looks at Redis")
def test_wake_up_that_cannot_send_a_tick_pings_fail(
    broker: RedisBroker, receiver: Receiver, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(broker.client.connection_pool, "get_connection", refuse)
        wake_up(broker, at(9))
        end_wake_up(broker, at(9))
    failed = receiver.next()
    wake_up(broker, at(9, 1))
    end_wake_up(broker, at(9, 1))

    assert (failed, receiver.next()) == ("/fail", "")


@pytest.mark.slow
def test_killed_worker_pings_nothing_and_the_next_one_does(
    environment: dict[str, str], queues: Queues, postgres: Database, receiver: Receiver, tmp_path: Path
) -> None:
    postgres.create_tables([UserStatus])
    postgres.execute_sql("INSERT INTO user_statuses (user_id, clear_status_at) VALUES (1, now())")
    postgres.execute_sql(
        "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "PERFORM pg_advisory_xact_lock(4711); RETURN OLD; END $$"
    )
    postgres.execute_sql("CREATE TRIGGER wait BEFORE DELETE ON user_statuses FOR EACH ROW EXECUTE FUNCTION slowly()")
    environment[f"{PREFIX}WORKERS"] = json.dumps({STATUSES: {"ping_url": receiver.url}})
    arguments = [*WORKER, "housekeeping.app", "-p", "1", "-t", "1"]

    with postgres.atomic():
        postgres.execute_sql("SELECT pg_advisory_xact_lock(4711)")
        with started(arguments, environment, tmp_path / "killed") as killed:
            queues.put("cronjob", STATUSES)
            eventually(lambda: killed.said("Run started"), killed)
            killed.kill()
    assert receiver.waiting() == []
    with started(arguments, environment, tmp_path / "next") as worker:
        queues.put("cronjob", STATUSES)
        eventually(lambda: receiver.waiting() == [""], worker)
        assert SECRET not in worker.text()


@pytest.mark.slow
def test_scheduler_pings_within_its_first_minute_and_stops_although_the_server_hangs(
    environment: dict[str, str], postgres: Database, receiver: Receiver, tmp_path: Path
) -> None:
    environment[f"{PREFIX}PING_URL"] = receiver.url
    receiver.hangs = True

    with started([*SCHEDULER, "housekeeping.app"], environment, tmp_path / "log") as process:
        assert receiver.next() == ""
        assert process.terminate() == 0
        assert SECRET not in process.text()
