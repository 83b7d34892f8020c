"""What identifies the person is nowhere after an erasure: not in tables, Redis, the ledger, the log or errors."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import redis

from housekeeping import Objects, ObjectStoreSettings, Settings
from tests.integration.erasure.shop import MARKER, MARKER_ID, PERSON, ask, deciding, erase, row, rows, with_key
from tests.integration.workers.object_storage.faulty_s3 import faulty_s3
from tests.internals.database import database
from tests.internals.erasures import ErasureInterrupted, execute, work
from tests.internals.workers import ObjectStore

pytestmark = pytest.mark.usefixtures("customers")


def _dump() -> str:
    """Return all rows of all tables of the database, the library's included."""
    found = database.execute_sql(
        "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables "
        "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    ).fetchall()
    return "\n".join(f"{table}: {database.execute_sql(f'SELECT * FROM {table}').fetchall()}" for (table,) in found)


def _dump_redis(client: redis.Redis) -> str:
    found = []
    for key in client.scan_iter():
        found.append(f"{key!r} {client.dump(key)!r}")
    return "\n".join(found)


def _logged(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(str(vars(each)) + str(each.exc_info) for each in caplog.records)


_MARKS = (MARKER, str(MARKER_ID))


def test_nothing_identifies_the_person_afterwards(
    settings: Settings, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "housekeeping")
    decided = deciding()
    database.execute_sql("DELETE FROM audit_entry; DELETE FROM attachment WHERE id = 3")

    assert erase(settings, decided).state == "done"

    places = {"tables": _dump(), "Redis": _dump_redis(redis_client), "log": _logged(caplog)}
    assert [(place, mark) for place, text in places.items() for mark in _MARKS if mark in text] == []
    assert "Erasure is done" in places["log"] and "erase:person" in places["tables"]


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
    places = {"ledger": ledger, "Redis": _dump_redis(redis_client), "log": _logged(caplog), "reports": reports}
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
        seen.append("\n".join([*lines, _dump_redis(redis_client), _logged(caplog)]))
        return left(self)

    monkeypatch.setattr(work.Erasing, "left", look)
    before = rows("orders")

    erase(settings)

    assert rows("orders") != before and "erase:person" in seen[0]
    assert [mark for mark in _MARKS if mark in seen[0]] == []
