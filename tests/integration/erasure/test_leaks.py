"""What identifies the person is nowhere after an erasure: not in tables, Redis, the ledger, the log or errors."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

import housekeeping
from housekeeping import Call, Delete, Guard, Limits, Objects, ObjectStoreSettings, Rows, Settings, Sweep
from tests.integration.erasure import shop
from tests.integration.erasure.shop import MARKER, MARKER_ID, PERSON, ask, dump_redis, erase, row, rows, with_key
from tests.integration.middleware.step_worker import StepWorker
from tests.integration.workers.object_storage.faulty_s3 import faulty_s3
from tests.internals.brokers import dead_letters_of
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.erasures import ErasureInterrupted, execute, ledger, work
from tests.internals.ledger import Rejection, Run
from tests.internals.workers import ObjectStore

pytestmark = pytest.mark.usefixtures("customers")


def _dump() -> str:
    """Return all rows of all tables of the database, the library's included."""
    found = database.execute_sql(
        "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables "
        "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    ).fetchall()
    return "\n".join(f"{table}: {database.execute_sql(f'SELECT * FROM {table}').fetchall()}" for (table,) in found)


def _logged(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(str(vars(each)) + str(each.exc_info) for each in caplog.records)


_MARKS = (MARKER, str(MARKER_ID))


def test_nothing_identifies_the_person_afterwards(
    settings: Settings, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG, "housekeeping")
    database.execute_sql("DELETE FROM audit_entry; DELETE FROM attachment WHERE id = 3")
    for name in (f"users/{MARKER_ID}/photo.png", f"users/{MARKER_ID}/small/photo.png", "users/1/photo.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    stores = {"avatars": ObjectStoreSettings(url=f"file://{tmp_path}")}
    subject = replace(PERSON, objects=[Objects("avatars", "users/{id}/")])

    assert erase(settings.model_copy(update={"object_stores": stores}), subject).state == "done"

    objects = [f"{each.relative_to(tmp_path)} {each.read_text()}" for each in tmp_path.rglob("*") if each.is_file()]
    places = {"tables": _dump(), "Redis": dump_redis(redis_client), "log": _logged(caplog), "objects": str(objects)}
    assert [(place, mark) for place, text in places.items() for mark in _MARKS if mark in text] == []
    assert "Erasure is done" in places["log"] and "erase:person" in places["tables"] and len(objects) == 1


@pytest.mark.parametrize("email", [MARKER, r'SHOP\zaphod "z"'])
def test_runs_of_sweeps_before_it_keep_no_identity(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, email: str
) -> None:
    """A run that ended early has a cursor, one with rejected rows their keys, and a cascade the keys of its parents."""

    def refuse(row: Any) -> None:
        raise ValueError(f"refused {row.email} and {row.id}")

    def sweep(name: str, action: Any, **options: Any) -> Sweep:
        rows = Rows("account", stale=lambda row: row.id > 0, order="email", action=action)
        return Sweep(name, rows, guard=Guard(first_run=False), **options)

    monkeypatch.setattr(ledger, "_AT_ONCE", 2)
    for table in ("account", "newsletter"):
        database.execute_sql(f"UPDATE {table} SET email = %s WHERE email = %s", (email, MARKER))
    ended = threading.Event()
    ended.set()
    kept = Delete(dependents={"orders": "keep"})
    for each in (sweep("shop.called", Call(refuse, then=Delete())), sweep("shop.kept", kept)):
        run_sweep(each)
    run_sweep(sweep("shop.stopped", Delete(dependents={"orders": "keep"}), limits=Limits(batch=1)), stopping=ended)
    cursor, blocked = {"stage": "rows", "position": [email, MARKER_ID]}, {"blocked": {"account": {"keys": {email: ""}}}}
    Run.update(cursor=cursor, traceback=f"x {MARKER_ID} y", error=f"at {email}", counts={"details": blocked}).where(
        Run.worker == "shop.stopped"
    ).execute()
    database.execute_sql("DELETE FROM audit_entry; DELETE FROM attachment WHERE id = 3")
    marks, before = (MARKER, repr(email)[1:-1], str(MARKER_ID)), _dump()
    assert before.count(marks[1]) > 3 and Rejection.select().exists()

    assert erase(settings).state == "done"

    after = _dump()
    assert [mark for mark in marks if mark in after] == []
    stopped = Run.get(Run.worker == "shop.stopped")
    assert (stopped.cursor, stopped.error, stopped.traceback) == (None, "at ***", "x *** y")
    assert "***" in str(Run.get(Run.worker == "shop.kept").counts)


_REFUSED = f"RAISE EXCEPTION 'refused for {MARKER} and {MARKER_ID}' USING DETAIL = OLD::text, ERRCODE ="
#: The text of the error has the statement.
_KILLED = f"EXECUTE 'SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(60) /* {MARKER}, {MARKER_ID} */'"


@pytest.mark.parametrize(
    ("act", "has_ended"), [(_KILLED, False), (f"{_REFUSED} '57P01'", True), (f"{_REFUSED} 'P0001'", True)]
)
def test_message_that_fails_leaves_no_identity_in_dead_letters_and_results(
    settings: Settings,
    broker: Any,
    worker: StepWorker,
    redis_client: redis.Redis,
    plant: Any,
    caplog: pytest.LogCaptureFixture,
    act: str,
    has_ended: bool,
) -> None:
    """The error of a row ends the erasure. Others end its message, whose traceback is stored."""
    for name in ("housekeeping", "dramatiq"):
        caplog.set_level(logging.DEBUG, name)
    plant("DELETE ON newsletter", "true", act)
    number = housekeeping.erase("person", MARKER_ID)
    message = worker.take()
    message.options["max_retries"] = 0

    worker.run(message)

    letters = [each.traceback for each in dead_letters_of(broker).newest_first()]
    assert (row(number).state, len(letters)) == (("incomplete", 0) if has_ended else ("running", 1))
    results = str(broker.get_results_backend().results)
    places = {"Redis": dump_redis(redis_client), "log": _logged(caplog), "letters": str(letters), "results": results}
    assert has_ended != ("DatabaseUnavailable" in results and "DatabaseUnavailable" in str(letters))
    assert [(place, mark) for place, text in places.items() for mark in _MARKS if mark in text] == []


def test_message_that_waits_for_another_system_has_no_identity(
    broker: Any, worker: StepWorker, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: str) -> None:
        raise ConnectionError(f"no answer about {key}, {MARKER}")

    monkeypatch.setattr(shop, "forget", fail)
    number = housekeeping.erase("person", MARKER_ID)

    worker.run()

    text = dump_redis(redis_client)
    assert (row(number).state, "cronjob.DQ" in text) == ("running", True)
    assert [mark for mark in _MARKS if mark in text] == []


@pytest.mark.parametrize(
    "event",
    ["DELETE ON item", "UPDATE ON orders", "DELETE ON account", "DELETE ON newsletter"],
)
def test_error_that_quotes_the_row_is_not_written_anywhere(
    settings: Settings,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    plant: Any,
    reported: list[dict[str, Any]],
    event: str,
) -> None:
    caplog.set_level(logging.DEBUG, "housekeeping")
    plant(event, "true", f"RAISE EXCEPTION 'refused for {MARKER} and {MARKER_ID}' USING DETAIL = OLD::text")

    left = erase(settings)

    ledger = "\n".join(line for line in _dump().splitlines() if settings.schema_name in line.partition(".")[0])
    reports = str([(each["error"].args, {**each, "error": ""}) for each in reported])
    places = {"ledger": ledger, "Redis": dump_redis(redis_client), "log": _logged(caplog), "reports": reports}
    assert left.state == "incomplete"
    assert "erase:person" in ledger and "P0001" in places["log"]
    assert [(place, mark) for place, text in places.items() for mark in _MARKS if mark in text] == []


def test_key_of_an_object_that_a_store_does_not_delete_is_not_logged(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttled = (503, "<Error><Code>SlowDown</Code></Error>")
    caplog.set_level(logging.DEBUG, "housekeeping")
    subject = replace(PERSON, objects=[Objects("avatars", "users/{id}/")])
    with faulty_s3() as store:
        paths = [f"users/{MARKER_ID}/{number}" for number in range(4)]
        monkeypatch.setattr(ObjectStore, "paths_below", lambda self, prefix: iter([paths]))  # it lists nothing
        store.objects = set(paths)
        store.behave = lambda server, keys, method: throttled if method == "DELETE" else (501, "")
        given = settings.model_copy(update={"object_stores": {"avatars": ObjectStoreSettings(**store.settings())}})
        number = ask(given, subject)
        with suppress(ErasureInterrupted):
            execute(number, with_key(given), {"person": subject})

        assert len(store.objects) == 4 and store.methods
    logged = _logged(caplog)
    assert "avatars" in logged and str(MARKER_ID) not in logged + str(row(number).error)


def test_running_erasure_has_the_key_in_its_row_alone(
    settings: Settings,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG, "housekeeping")
    seen: list[str] = []
    left = work.Erasing.left

    def look(self: Any) -> Any:
        lines = [each for each in _dump().splitlines() if settings.schema_name in each and "erasures:" not in each]
        seen.append("\n".join([*lines, dump_redis(redis_client), _logged(caplog)]))
        return left(self)

    monkeypatch.setattr(work.Erasing, "left", look)
    before = rows("orders")

    erase(settings)

    assert rows("orders") != before and "erase:person" in seen[0]
    assert [mark for mark in _MARKS if mark in seen[0]] == []
