"""Large subjects: bounded transactions of an erasure, and flat memory of an export."""

from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any, Final

import pytest

from housekeeping import Limits, Settings
from tests.integration.erasure.shop import ERASED, MARKER, MARKER_ID, PERSON, ask, row, rows, with_key
from tests.internals.database import database
from tests.internals.erasures import Erasing, Erasure, execute, export, work

#: Many rows.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("customers")]

ROWS: Final = 25_000  # in each of four tables
_ADD: Final = f"""
INSERT INTO session SELECT n, {MARKER_ID} FROM generate_series(101, 100 + {ROWS}) AS n;
INSERT INTO item SELECT n, 1 + n %% 4, '{MARKER}' FROM generate_series(101, 100 + {ROWS}) AS n;
INSERT INTO orders SELECT n, {MARKER_ID}, '{MARKER}', '{MARKER}' FROM generate_series(101, 100 + {ROWS}) AS n;
INSERT INTO newsletter SELECT n, '{MARKER}' FROM generate_series(101, 100 + {ROWS}) AS n;
"""
#: Records the transaction and the number of rows of each statement.
_RECORD: Final = """
CREATE TABLE written (transaction bigint, rows bigint);
CREATE FUNCTION record() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO written SELECT txid_current(), count(*) FROM gone HAVING count(*) > 0; RETURN NULL;
END $$;
"""


def test_large_subject_is_erased_in_bounded_transactions(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the batches is fixed, because otherwise it depends on the time that they take."""
    monkeypatch.setattr(work, "Limits", partial(Limits, batch_takes=None))
    database.execute_sql(_ADD + _RECORD)
    for table, event in {"session": "DELETE", "item": "DELETE", "orders": "UPDATE", "newsletter": "DELETE"}.items():
        database.execute_sql(
            f"CREATE TRIGGER record AFTER {event} ON {table} REFERENCING OLD TABLE AS gone "
            "FOR EACH STATEMENT EXECUTE FUNCTION record()"
        )
    database.execute_sql("ANALYZE")

    number = ask(settings)
    Erasure.update(confirmed=True).execute()

    execute(number, with_key(settings), {"person": PERSON})

    done = row(number)
    by_transaction: Any = "SELECT sum(rows)::int FROM written GROUP BY transaction"
    numbers = [number for (number,) in database.execute_sql(by_transaction).fetchall()]
    assert (done.state, sum(numbers)) == ("done", 4 * ROWS + 18)
    assert max(numbers) <= work._BATCH
    assert len(numbers) <= 1.2 * sum(numbers) / work._BATCH + 4
    assert rows("session", "item", "newsletter") == {name: ERASED[name] for name in ("session", "item", "newsletter")}


def test_export_of_a_large_subject_takes_no_more_memory(settings: Settings) -> None:
    def measured() -> tuple[int, int]:
        erasing = Erasing(PERSON, [str(MARKER_ID)], [], ())
        tracemalloc.start()
        number = sum(1 for _ in export(PERSON, erasing.reach, erasing.found, settings))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return number, peak

    measured()
    few, _ = measured()
    database.execute_sql(_ADD)

    many, peak = measured()

    assert (few, many) == (23, 23 + 4 * ROWS)
    assert peak < 3_000_000
