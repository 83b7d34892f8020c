"""Plans of a run, and PostgreSQL's query plans."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from housekeeping.testing.stubs import ManualClock
from tests.integration.statements import watch_statements
from tests.integration.workers.bulk_imports.conftest import EACH, FRESH, LIMIT, Tables
from tests.internals.database import Database
from tests.internals.engine import run_sweep
from tests.internals.insight import plan
from tests.internals.sweeps import Batch, TableStage
from tests.internals.workers import imports_sweep as sweep


@pytest.mark.parametrize(("limit", "exact"), [(11, False), (12, True)])
def test_plan_with_too_many_trackers_is_not_exact(tables: Tables, clock: ManualClock, limit: int, exact: bool) -> None:
    tables.add_entities(3)
    tables.add_trackers(EACH, "0, 1, 3, 0")

    planned = plan(sweep, clock=clock, limit=limit)

    assert planned.stale.exact is exact
    assert planned.stages[1][0].counts == {"timed_out_entities": 3, "timed_out_trackers": limit}


@pytest.fixture
def many(tables: Tables) -> Tables:
    """Forty thousand imports and entities, of which two thousand are stale, and as many trackers again."""
    spread = f"{LIMIT} + interval '1 second' * (n - 2000)"
    tables.add_imports(40_000, spread)
    tables.do("SET session_replication_role = replica")  # without looking up each foreign key
    tables.add_entities(40_000, spread)
    tables.add_trackers(EACH, "1, 3")
    tables.do("SET session_replication_role = origin")
    for table in ("bulk_imports", "bulk_import_entities", "bulk_import_trackers"):
        tables.do(f"ANALYZE {table}")
    return tables


def explained(postgres: Database, sql: str, parameters: Any = None) -> str:
    return "\n".join(row[0] for row in postgres.execute_sql(f"EXPLAIN {sql}", parameters))


@pytest.fixture
def plans(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return PostgreSQL's plan of each executed statement on these tables."""
    plans: list[str] = []

    def explain(sql: str) -> None:
        # A statement that is not prepared yet cannot be explained, so none is prepared here.
        for each in sql.split("; "):
            if "bulk_import" in each and "pg_" not in each and not each.startswith("EXPLAIN"):
                plans.append(explained(postgres, each))

    watch_statements(monkeypatch, explain, with_values=True)
    return plans


@pytest.mark.slow
def test_all_statements_use_indexes(many: Tables, clock: ManualClock, plans: list[str]) -> None:
    result = run_sweep(sweep, clock=clock)

    assert result.counts["timed_out_trackers"] == 4000 - 2
    assert [each for each in plans if "Seq Scan" in each] == []
    imports = [each for each in plans if "Update on bulk_imports" in each]
    entities = [each for each in plans if "CTE locked_rows" in each]
    trackers = [each for each in plans if "Update on bulk_import_trackers" in each]
    assert all("index_bulk_imports_on_updated_at_and_id_for_stale" in each for each in imports)
    assert all("index_bulk_import_entities_on_updated_at_and_id_for_stale" in each for each in entities)
    assert all("bulk_import_trackers_bulk_import_entity_id_relation" in each for each in trackers)
    assert (len(imports), len(entities), len(trackers)) == (2, 20, 20)


@pytest.mark.slow
def test_statement_is_linear_with_outdated_statistics(tables: Tables, clock: ManualClock, plans: list[str]) -> None:
    # A backlog that came at once: PostgreSQL takes what is stale for a row or two, and would read all of it each time.
    tables.add_imports(10_000, FRESH, first_id=20_001)
    tables.add_entities(10_000, FRESH, first_id=20_001)
    tables.do("ANALYZE bulk_imports; ANALYZE bulk_import_entities")
    tables.add_imports(10_000)
    tables.add_entities(1000)
    tables.add_trackers(EACH, "1, 3")

    result = run_sweep(sweep, clock=clock)

    assert (result.counts["timed_out_imports"], result.counts["timed_out_entities"]) == (10_000, 1000)
    assert [each for each in plans if "Join Filter" in each] == []
    imports = [each for each in plans if "Update on bulk_imports" in each]
    entities = [each for each in plans if "Update on bulk_import_entities" in each]
    assert all("Tid Scan on bulk_imports" in each for each in imports)
    assert all("Tid Scan on bulk_import_entities" in each for each in entities)


@pytest.mark.slow
def test_oldest_and_backlog_use_indexes(postgres: Database, many: Tables, clock: ManualClock) -> None:
    for each in sweep.stages_for_run():
        assert isinstance(each, TableStage)
        after = (clock.now() - timedelta(hours=24, seconds=500), 3)
        for position in (None, after):
            batch = Batch(sweep.name, None, clock.now(), position)
            shown = explained(postgres, *each.rows(batch).sql())
            assert f"index_{each.model._meta.table_name}_on_updated_at_and_id_for_stale" in shown
            assert "Seq Scan" not in shown
