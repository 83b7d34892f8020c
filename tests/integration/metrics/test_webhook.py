"""Webhook with the beginning and the end of each alert, received by a local server."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Barrier, Thread
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any, Final

import pytest
import redis
from pydantic import SecretStr

from docs.examples.webhook.verification import is_from
from housekeeping import Settings
from housekeeping.workers.user_status_cleanup.models import UserStatus
from tests.integration.metrics.receiver import PATIENCE_S, Received, Receiver, receiving
from tests.internals.core import MAIN, PREFIX, SettingsError
from tests.internals.database import Database, database
from tests.internals.doctor import examine
from tests.internals.insight import Alert, AlertWebhook, InstallationWatch
from tests.internals.ledger import AlertRow, acknowledge, reconcile
from tests.internals.workers import status_sweep as sweep
from tests.unit.docs.blocks import ROOT, blocks

SECRET: Final = f"whsec_{base64.b64encode(b'0123456789abcdef01234567').decode()}"
ALERT: Final = Alert("backlog", "too many", 10, 12, worker="shop.carts")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture
def given(settings: Settings, postgres: Database, receiver: Receiver) -> Settings:
    update = {"alert_webhook_url": SecretStr(receiver.url), "alert_webhook_secret": SecretStr(SECRET)}
    return settings.model_copy(update=update)


@pytest.fixture
def webhook(given: Settings) -> AlertWebhook:
    return AlertWebhook(given)


def store(*found: Alert) -> None:
    """Store which alerts are active, and end the others."""
    with database.using(MAIN):
        reconcile(found, lambda _: True, datetime.now(UTC))


def send(webhook: AlertWebhook) -> None:
    webhook.send_due({})
    webhook.wait(PATIENCE_S)


def make_due() -> None:
    AlertRow.update(due_at=datetime.now(UTC) - timedelta(seconds=1)).execute()


def content(received: Received) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(received.body)
    return found


def types(receiver: Receiver) -> list[str]:
    return [content(each)["type"] for each in receiver.taken()]


def test_begin_and_end_are_sent_once_and_signed(webhook: AlertWebhook, receiver: Receiver) -> None:
    store(replace(ALERT, text="password=hunter4 is wrong"))
    send(webhook)
    send(webhook)
    begin, *others = receiver.taken()
    store()
    send(webhook)
    send(webhook)
    [end] = receiver.taken()

    assert others == []
    for each in (begin, end):
        assert is_from(SECRET, each.headers, each.body) and each.headers["content-type"] == "application/json"
        assert content(each)["id"] == each.headers["webhook-id"]
    assert not is_from(SECRET, begin.headers, end.body)
    assert (content(begin)["type"], content(end)["type"]) == ("alert.begin", "alert.end")
    assert content(begin)["id"] != content(end)["id"] and content(begin)["at"] < content(end)["at"]
    alert = content(begin)["alert"]
    assert (alert["worker"], alert["name"], alert["limit"], alert["value"]) == ("shop.carts", "backlog", 10, 12)
    assert alert["text"] == "password=*** is wrong" and alert["since"] == content(begin)["at"]


def test_body_has_the_shape_that_the_page_shows(webhook: AlertWebhook, receiver: Receiver) -> None:
    [shown] = [block.text for block in blocks(ROOT / "docs/howto/webhook.md") if block.kind == "json"]
    store(ALERT)
    send(webhook)

    sent, example = content(receiver.take()), json.loads(shown)
    assert (list(sent), list(sent["alert"])) == (list(example), list(example["alert"]))


def test_old_signature_is_rejected_by_the_example(
    webhook: AlertWebhook, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("housekeeping.insight.webhook.time", SimpleNamespace(time=lambda: 1_700_000_000))
    store(ALERT)
    send(webhook)
    monkeypatch.undo()
    [begin] = receiver.taken()

    assert not is_from(SECRET, begin.headers, begin.body)


def test_evaluation_in_the_background_sends_with_the_cause(
    given: Settings, postgres: Database, receiver: Receiver, redis_client: redis.Redis
) -> None:
    postgres.create_tables([UserStatus])
    away = given.model_copy(update={"redis_url": "unix:///nowhere/redis.sock", "broker_url": None})
    now = datetime.now(UTC)
    with database.using(MAIN):
        reconcile([Alert("no_worker", "none", since=now)], lambda _: True, now)

    InstallationWatch(away, {sweep.name: sweep}).look()

    received = [content(receiver.take())["alert"] for _ in range(2)]
    causes = {each["name"]: each["cause"] for each in received}
    assert causes["unavailable"] is None
    assert causes["no_worker"] == {"worker": "", "name": "unavailable", "subject": "Redis"}


def test_refused_event_is_sent_again_with_its_id(webhook: AlertWebhook, receiver: Receiver) -> None:
    store(ALERT)
    receiver.answers = [500, 503]

    for _ in range(2):
        send(webhook)
        send(webhook)
        make_due()
    send(webhook)
    send(webhook)

    received = receiver.taken()
    assert len(received) == 3 and len({each.headers["webhook-id"] for each in received}) == 1


def test_time_until_the_next_attempt_doubles_up_to_a_limit(webhook: AlertWebhook, receiver: Receiver) -> None:
    store(ALERT)
    receiver.answers = [500] * 8
    waits = []

    for _ in range(8):
        make_due()
        before = datetime.now(UTC)
        send(webhook)
        waits.append((AlertRow.get().due_at - before).total_seconds())

    assert waits == pytest.approx([30, 60, 120, 240, 480, 900, 900, 900], abs=10)


@pytest.mark.parametrize("status", [500, 302, 429, 408])
def test_receiver_that_takes_nothing_gets_one_request_at_a_time(
    webhook: AlertWebhook, receiver: Receiver, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    store(*(replace(ALERT, subject=str(number)) for number in range(3)))
    receiver.answers = [status, status]

    send(webhook)
    first = len(receiver.taken())
    send(webhook)

    assert (first, len(receiver.taken())) == (1, 1)
    [record] = caplog.records
    assert (record.getMessage(), vars(record)["reason"]) == ("Webhook could not be sent", f"status {status}")
    send(webhook)
    make_due()
    send(webhook)
    assert types(receiver) == ["alert.begin"] * 3


def test_rejected_event_does_not_delay_the_others(webhook: AlertWebhook, receiver: Receiver) -> None:
    store(*(replace(ALERT, subject=str(number)) for number in range(3)))
    receiver.answers = [400]

    send(webhook)

    assert len(receiver.taken()) == 3
    assert AlertRow.select().where(AlertRow.delivered == "begin").count() == 2


def test_receiver_that_was_down_gets_begin_and_end_in_order(webhook: AlertWebhook, receiver: Receiver) -> None:
    receiver.answers = [503, 503]
    store(ALERT)
    send(webhook)
    store()
    make_due()
    send(webhook)
    receiver.taken()
    make_due()
    send(webhook)

    assert types(receiver) == ["alert.begin", "alert.end"]


def test_receiver_that_is_stopped_costs_one_line_without_the_url(
    webhook: AlertWebhook, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.close()
    store(ALERT)

    for _ in range(3):
        make_due()
        send(webhook)

    [record] = caplog.records
    assert vars(record)["reason"] == "[Errno 111] Connection refused" and "4f0c" not in caplog.text


def test_hanging_receiver_delays_no_evaluation(
    given: Settings, postgres: Database, receiver: Receiver, redis_client: redis.Redis
) -> None:
    postgres.create_tables([UserStatus])
    receiver.hangs = True
    store(*(replace(ALERT, subject=str(number)) for number in range(3)))
    watch = InstallationWatch(given, {sweep.name: sweep})

    for _ in range(3):
        postgres.execute_sql(f'DELETE FROM "{AlertRow._meta.schema}".evaluations')
        watch.look()

    assert content(receiver.take())["type"] == "alert.begin"
    assert receiver.most_at_once == 1
    receiver.answer()
    for thread in enumerate_threads():
        if thread.name == "webhook":
            thread.join(PATIENCE_S)  # it still writes to the database, which the test is about to leave


#: A process that sends what is due.
_SENDER: Final = """
from housekeeping import Settings
from housekeeping.insight.webhook import AlertWebhook
from housekeeping.ledger.schema import use_database

settings = Settings.load()
use_database(settings)
webhook = AlertWebhook(settings)
webhook.send_due({})
webhook.wait(60)
"""


@pytest.fixture
def sender(environment: dict[str, str], receiver: Receiver) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Return a function that starts a process that sends what is due."""
    variables = {f"{PREFIX}ALERT_WEBHOOK_URL": receiver.url, f"{PREFIX}ALERT_WEBHOOK_SECRET": SECRET}
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", _SENDER], env=environment | variables))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait(PATIENCE_S)


@pytest.mark.slow
def test_event_of_a_killed_sender_is_sent_again_with_its_id(
    webhook: AlertWebhook, receiver: Receiver, sender: Callable[[], subprocess.Popen[bytes]]
) -> None:
    store(ALERT)
    processes: list[subprocess.Popen[bytes]] = []
    receiver.before_answer = lambda: [os.kill(each.pid, signal.SIGKILL) for each in processes]  # type: ignore[func-returns-value]
    process = sender()
    processes.append(process)

    first = receiver.take()
    process.wait(PATIENCE_S)
    processes.clear()
    send(webhook)
    too_early = receiver.taken()
    make_due()
    send(webhook)

    assert (process.returncode, too_early) == (-signal.SIGKILL, [])
    assert receiver.take().headers["webhook-id"] == first.headers["webhook-id"]


def test_events_are_sent_once_each_by_two_senders(given: Settings, receiver: Receiver) -> None:
    store(*(replace(ALERT, subject=str(number)) for number in range(200)))
    both, barrier = [AlertWebhook(given), AlertWebhook(given)], Barrier(2)

    def work(webhook: AlertWebhook) -> None:
        barrier.wait(PATIENCE_S)
        send(webhook)

    threads = [Thread(target=work, args=(each,)) for each in both]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    subjects = [content(each)["alert"]["subject"] for each in receiver.taken()]
    assert sorted(subjects, key=int) == [str(number) for number in range(200)]
    assert AlertRow.select().where(AlertRow.delivered == "begin").count() == 200


def test_connection_lost_during_a_request_does_not_repeat_it(
    webhook: AlertWebhook, receiver: Receiver, admin: Any
) -> None:
    store(ALERT)
    ended: list[int] = []

    def end_senders_connection() -> None:
        with admin.cursor() as cursor:
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND query LIKE %s",
                (f'%UPDATE "{AlertRow._meta.schema}".alerts SET attempts%',),
            )
            ended.append(cursor.fetchone()[0])

    receiver.before_answer = end_senders_connection
    send(webhook)
    make_due()
    send(webhook)

    assert ended == [1] and types(receiver) == ["alert.begin"]


def test_acceptance_that_cannot_be_stored_at_once_is_stored_later(
    webhook: AlertWebhook, receiver: Receiver, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = AlertRow._meta.schema
    store(ALERT)
    waited: list[float] = []

    def rename(before: str, after: str) -> None:
        with admin.cursor() as cursor:
            cursor.execute(f'ALTER TABLE "{schema}".{before} RENAME TO {after}')

    def repair(wait_s: float) -> None:
        waited.append(wait_s)
        if len(waited) == 2:
            rename("away", "alerts")

    receiver.before_answer = lambda: rename("alerts", "away")
    # Only this module's name: `time.sleep` itself is also called by threads that other tests have started.
    monkeypatch.setattr("housekeeping.insight.webhook.time", SimpleNamespace(time=time.time, sleep=repair))
    send(webhook)
    receiver.before_answer = bool
    make_due()
    send(webhook)

    assert waited == [1, 2] and types(receiver) == ["alert.begin"]


def test_unreachable_database_costs_one_line_and_no_event(
    webhook: AlertWebhook, receiver: Receiver, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    schema = AlertRow._meta.schema
    store(ALERT)
    with admin.cursor() as cursor:
        cursor.execute(f'ALTER TABLE "{schema}".alerts RENAME TO away')
    send(webhook)
    send(webhook)
    with admin.cursor() as cursor:
        cursor.execute(f'ALTER TABLE "{schema}".away RENAME TO alerts')
    send(webhook)

    assert types(receiver) == ["alert.begin"]
    [record] = caplog.records
    assert vars(record)["reason"].startswith("the alerts cannot be read: ")


def test_time_from_before_the_clock_was_set_back_delays_nothing(webhook: AlertWebhook, receiver: Receiver) -> None:
    store(ALERT)
    AlertRow.update(due_at=datetime.now(UTC) + timedelta(days=3)).execute()

    send(webhook)

    assert types(receiver) == ["alert.begin"]


@pytest.mark.parametrize(("hours", "sent"), [(23, 2), (25, 0)])
def test_events_are_given_up_a_day_after_the_end(
    webhook: AlertWebhook, receiver: Receiver, hours: int, sent: int
) -> None:
    store(ALERT)
    store()
    then = datetime.now(UTC) - timedelta(hours=hours)
    AlertRow.update(began_at=then, seen_at=then, ended_at=then).execute()

    send(webhook)

    assert len(receiver.taken()) == sent


def test_acknowledgment_is_in_the_event_of_the_end(webhook: AlertWebhook, receiver: Receiver) -> None:
    store(ALERT)
    send(webhook)
    with database.using(MAIN):
        acknowledge(reconcile([ALERT], lambda _: True, datetime.now(UTC))[0], "kim")
    store()
    send(webhook)

    *_, end = receiver.taken()
    assert content(end)["alert"]["acknowledged"]["user"] == "kim"


def test_without_a_url_nothing_is_sent(settings: Settings, postgres: Database) -> None:
    store(ALERT)

    send(AlertWebhook(settings))

    assert AlertRow.get().attempts == 0


def test_doctor_counts_the_events_that_wait(webhook: AlertWebhook, receiver: Receiver, given: Settings) -> None:
    def finding() -> tuple[str, str]:
        [found] = [each for each in examine(given, {sweep.name: sweep}) if each.area == "webhook"]
        return found.level, found.text

    store(ALERT)
    receiver.answers = [500, 500]
    send(webhook)
    once = finding()
    make_due()
    send(webhook)
    twice = finding()
    make_due()
    send(webhook)

    assert (once[0], twice, finding()[0]) == (
        "fine",
        ("warning", "1 event not accepted by the receiver, and sent again"),
        "fine",
    )


def load(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Settings:
    for name, value in variables.items():
        monkeypatch.setenv(f"{PREFIX}{name}", value)
    return Settings.load()


@pytest.mark.parametrize("secret", ["hunter4", "whsec_", "whsec_aHVudGVyNA==", "whsec_***", f"whsec_{'aa' * 60}"])
def test_wrong_secret_is_rejected_and_not_shown(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(monkeypatch, ALERT_WEBHOOK_URL="https://host/x", ALERT_WEBHOOK_SECRET=secret)

    assert str(refused.value) == (
        "HOUSEKEEPING_ALERT_WEBHOOK_SECRET is ***; it should be whsec_ and 24 to 64 random bytes in base64 "
        "(openssl rand -base64 32)"
    )


def test_url_needs_a_secret_and_is_in_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="ALERT_WEBHOOK_SECRET, which signs") as refused:
        load(monkeypatch, ALERT_WEBHOOK_URL="https://host/4f0c")
    with pytest.raises(SettingsError, match="should be a URL such as https://alerts") as wrong:
        load(monkeypatch, ALERT_WEBHOOK_URL="ftp://host/4f0c")
    settings = load(monkeypatch, ALERT_WEBHOOK_URL="https://host/4f0c", ALERT_WEBHOOK_SECRET=SECRET)

    shown = f"{refused.value} {wrong.value} {settings!r} {settings.model_dump()}"
    assert "4f0c" not in shown and SECRET not in shown
