"""What Citus refuses on distributed tables: plan, doctor and run have one line for it, and nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import redis
from peewee import IntegerField, NotSupportedError, fn

from housekeeping import BaseModel, Delete, Settings, Subject, Sweep
from housekeeping.testing.stubs import ManualClock
from tests.citus_like import Cluster
from tests.integration.conftest import Do
from tests.integration.sweeps.distributed.test_batches import HeldTenant, Ticket, run, sweep
from tests.integration.sweeps.distributed.test_batches import left as left
from tests.integration.sweeps.documents import NOW
from tests.internals.core import DeclarationError, WrongArgument
from tests.internals.database import Database
from tests.internals.doctor import examine_stages
from tests.internals.engine import PurgeRequest, run_sweep, sweep_of
from tests.internals.erasures import read_reach
from tests.internals.insight import plan, plan_purge
from tests.internals.workers import (
    BUILD_MODELS,
    GIT_MODELS,
    IMPORT_MODELS,
    drop_pending,
    drop_running,
    imports_sweep,
    project_cleanup,
    status_sweep,
)

pytestmark = pytest.mark.on_citus


class LocalHold(BaseModel):
    tenant = IntegerField(primary_key=True)

    class Meta:
        table_name = "local_holds"


HELD_LOCALLY = (
    '"tickets" is distributed, and its predicate or hold reads "local_holds", which is not; '
    'SELECT create_reference_table(\'"local_holds"\'), or compare a column of "tickets" itself'
)
REFUSED = 'Citus refuses a batch of the distributed table "tickets": '
VOLATILE = f"{REFUSED}functions used in UPDATE queries on distributed tables must not be VOLATILE"
WITH_DEPENDENTS = (
    "tickets is a distributed table of Citus, whose rows cannot be locked with their dependents; give each table a "
    "sweep, or foreign keys between colocated tables ON DELETE CASCADE"
)


PICKED = "WITH picked AS MATERIALIZED (SELECT tenant, id FROM tickets ORDER BY expires_at LIMIT 10)"
OF_PICKED = "(tenant, id) IN (SELECT tenant, id FROM picked)"


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("SELECT id FROM tickets LIMIT 1 FOR UPDATE", "could not run distributed query with FOR UPDATE/SHARE commands"),
        (
            "SELECT id FROM tickets AS t WHERE EXISTS (SELECT FROM local_holds AS l WHERE l.tenant = t.tenant)",
            "direct joins between distributed and local tables are not supported",
        ),
        (
            f"{PICKED} DELETE FROM tickets WHERE {OF_PICKED} AND COALESCE(expires_at < now(), false)",
            "non-IMMUTABLE functions are not allowed in CASE or COALESCE statements",
        ),
        (
            f"{PICKED} UPDATE tickets SET expires_at = clock_timestamp() WHERE {OF_PICKED}",
            "functions used in UPDATE queries on distributed tables must not be VOLATILE",
        ),
        (
            f"{PICKED} UPDATE tickets SET status = 'x' WHERE {OF_PICKED} RETURNING expires_at = now()",
            "non-IMMUTABLE functions are not allowed in the RETURNING clause",
        ),
        (
            "WITH picked AS MATERIALIZED (SELECT ctid FROM tickets LIMIT 9) DELETE FROM tickets WHERE ctid = ANY "
            "(ARRAY(SELECT ctid FROM picked))",
            "cannot perform distributed planning for the given modification",
        ),
        (
            "SELECT found.id FROM held_tenants AS h, LATERAL (SELECT id FROM tickets WHERE tickets.tenant = h.tenant "
            "ORDER BY expires_at LIMIT 3) AS found",
            "cannot push down this subquery",
        ),
        (f"{PICKED} DELETE FROM tickets WHERE {OF_PICKED} AND (expires_at < now()) IS TRUE RETURNING tenant, id", None),
        (f"{PICKED} UPDATE tickets SET expires_at = statement_timestamp() WHERE {OF_PICKED}", None),
        ("SELECT id FROM tickets AS t WHERE EXISTS (SELECT FROM held_tenants AS h WHERE h.tenant = t.tenant)", None),
    ],
)
def test_proxy_refuses_what_citus_refuses_in_its_words(
    statement: str, text: str | None, tables: Callable[[], list[int]], postgres: Database
) -> None:
    # On a server with Citus, this compares the proxy's rules with it.
    with nullcontext() if text is None else pytest.raises(NotSupportedError, match=f"^{re.escape(text)}"):
        postgres.execute_sql(f"EXPLAIN {statement}")


@pytest.fixture
def tables(left: Callable[[], list[int]], do: Do) -> Callable[[], list[int]]:
    do("CREATE TABLE local_holds (tenant integer PRIMARY KEY)")
    return left


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        pytest.param(sweep(hold=lambda row: LocalHold.tenant == row.tenant), HELD_LOCALLY, id="hold of a local table"),
        pytest.param(sweep(hold=lambda row: row.expires_at > fn.CLOCK_TIMESTAMP()), VOLATILE, id="volatile function"),
        pytest.param(sweep(Delete(dependents=True)), WITH_DEPENDENTS, id="cascade"),
    ],
)
def test_plan_doctor_and_run_refuse_it_in_the_same_words(
    of: Sweep, problem: str, tables: Callable[[], list[int]], settings: Settings
) -> None:
    before = tables()

    with pytest.raises(DeclarationError) as planned:
        plan(of)
    errors = [each for each in examine_stages(settings, {of.name: of}) if each.level == "error"]
    ended = run(of)

    assert str(planned.value) == f"{of.name}: {problem}"
    assert ["; ".join(each for each in (error.text, error.way_out) if each) for error in errors] == [problem]
    assert (ended.outcome, ended.reason) == ("failed", str(planned.value))
    assert tables() == before


def test_purge_that_reads_a_local_table_is_refused(tables: Callable[[], list[int]]) -> None:
    request = PurgeRequest(
        table="tickets", where="EXISTS (SELECT FROM local_holds AS l WHERE l.tenant = tickets.tenant)"
    )

    with pytest.raises(WrongArgument, match="Citus refuses a batch of the distributed table"):
        plan_purge(request, sweep_of(request))


def test_plan_of_an_accepted_sweep_is_what_its_run_does(tables: Callable[[], list[int]]) -> None:
    of = sweep(hold=lambda row: HeldTenant.tenant == row.tenant)

    [(stage, _)] = plan(of, clock=ManualClock(NOW)).stages

    assert (stage.stale.rows, stage.held and stage.held.rows) == (16, 4)


def test_process_notices_that_tables_were_distributed(
    postgres: Database, cluster: Cluster, do: Do, redis_client: redis.Redis
) -> None:
    do(
        "CREATE TABLE tickets (tenant int, id bigint, status text, on_hold boolean, expires_at timestamptz, "
        "PRIMARY KEY (tenant, id)); CREATE TABLE local_holds (tenant integer PRIMARY KEY)"
    )
    of = sweep(hold=lambda row: LocalHold.tenant == row.tenant)
    add = "INSERT INTO tickets SELECT n % 5, n, 'open', NULL, '2025-12-01' FROM generate_series(1, 20) AS n"
    do(add)
    before = run(of)
    cluster.distribute("tickets", "tenant")
    do(add)
    noticing, refused = run(of), run(of)
    cluster.refer("local_holds")
    after = run(of)

    assert [each.outcome for each in (before, noticing, refused, after)] == ["done", "failed", "failed", "done"]
    assert HELD_LOCALLY in str(refused.reason)
    assert (before.counts["deleted_rows"], after.counts["deleted_rows"]) == (20, 20)


def test_erasure_of_a_distributed_table_is_refused(tables: Callable[[], list[int]]) -> None:
    with pytest.raises(DeclarationError, match=WITH_DEPENDENTS):
        read_reach(Subject("person", Ticket))


@pytest.mark.parametrize(
    ("models", "of", "refused"),
    [
        pytest.param([], status_sweep, None, id="statuses"),
        pytest.param(IMPORT_MODELS.values(), imports_sweep, "FOR UPDATE/SHARE", id="imports"),
        pytest.param(GIT_MODELS.values(), project_cleanup, "FOR UPDATE/SHARE", id="git refs"),
        *(pytest.param(BUILD_MODELS.values(), each, None, id=each.name) for each in (drop_pending, drop_running)),
    ],
)
def test_built_in_worker_works_or_is_refused(
    models: Any, of: Sweep, refused: str | None, statuses: Any, postgres: Database, settings: Settings
) -> None:
    postgres.create_tables(list(models))

    errors = [each for each in examine_stages(settings, {of.name: of}) if each.level == "error"]
    ended = run_sweep(of, 1 if of.argument is not None else None)

    assert [refused in each.text for each in errors if refused is not None] == [True] * (refused is not None)
    assert ended.outcome == ("done" if refused is None else "failed"), ended.reason
    assert refused is None or str(ended.reason).startswith(f"{of.name}: {errors[0].text}")
