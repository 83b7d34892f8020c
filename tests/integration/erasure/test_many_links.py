"""Tables with several links to the table above, at many levels: the cost grows with the levels, not with the paths."""

from __future__ import annotations

from typing import Any, Final

import pytest

from housekeeping import Delete, Keep, Settings, Subject
from tests.integration.erasure.shop import erase, with_key
from tests.integration.statements import watch_statements
from tests.internals.database import database
from tests.internals.erasures import Erasing, export, plan_erasure

#: Many tables.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("customers")]

KEPT: Final = Keep("why", anonymise={"note": "erased"})


def _create(levels: int) -> None:
    """Create tables of which each has two links to the one above; two rows of two subjects in each."""
    database.execute_sql("CREATE TABLE level_0 (id bigint PRIMARY KEY); INSERT INTO level_0 VALUES (1), (2)")
    for level in range(1, levels + 1):
        above, own = f"level_{level - 1}", f"level_{level}"
        database.execute_sql(
            f"CREATE TABLE {own} (id bigint PRIMARY KEY, a bigint REFERENCES {above}, b bigint REFERENCES {above}, "
            f"note text); CREATE INDEX ON {own} (a); CREATE INDEX ON {own} (b);"
            f"INSERT INTO {own} VALUES (1, 1, NULL, 'x'), (2, NULL, 2, 'x'), (3, 2, 2, 'x')"
        )


def _subject(levels: int, decision: Any) -> Subject:
    if decision == Delete():
        return Subject("level", "level_0", tables={f"level_{each}": decision for each in range(1, levels + 1)})
    released = {f"level_1.{each}": Keep("why", anonymise={each: None, "note": "erased"}) for each in "ab"}
    return Subject(
        "level", "level_0", tables={**released, **{f"level_{each}": decision for each in range(2, levels + 1)}}
    )


@pytest.mark.parametrize("decision", [Delete(), KEPT])
def test_statements_grow_with_the_levels(settings: Settings, decision: Any) -> None:
    longest, numbers = dict[int, int](), dict[int, int]()
    for levels in (4, 8, 12):
        _create(levels)
        subject, seen = _subject(levels, decision), list[str]()
        with pytest.MonkeyPatch.context() as patch:
            watch_statements(patch, seen.append)
            erasing = Erasing(subject, ["1"], [], ())
            plan_erasure(erasing, "")
            exported = list(export(subject, erasing.reach, erasing.found, with_key(settings)))
            done = erase(settings, subject, 1)
        longest[levels], numbers[levels] = max(map(len, seen)), len(seen)
        assert (done.state, done.error, len(exported)) == ("done", None, 1 + levels)
        database.execute_sql(f"DROP TABLE {', '.join(f'level_{each}' for each in range(levels + 1))} CASCADE")

    assert numbers[12] - numbers[8] <= 1.1 * (numbers[8] - numbers[4])
    # One statement counts the rows of all links.
    assert longest[12] <= (12 / 4) ** 2 * longest[4]
