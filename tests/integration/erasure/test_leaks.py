"""What identifies the person is nowhere after an erasure: not in tables, Redis, the ledger, the log or errors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis

from housekeeping import Settings
from tests.integration.erasure.shop import MARKER, MARKER_ID, deciding, erase, rows
from tests.internals.database import database
from tests.internals.erasures import work

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
