"""Server time and size of the dashboard's pages, with 60 workers and 100,000 runs: ``python -m benchmarks.pages``."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Final

import click
from flask.testing import FlaskClient
from peewee import BigAutoField
from psycopg2.extensions import connection as Connection
from werkzeug.test import TestResponse

from benchmarks.servers import Stage, started
from housekeeping import Delete, Limits, Rows, Sweep
from housekeeping.core import logs
from housekeeping.core.settings import MAIN, Settings
from housekeeping.database.connection import BaseModel, connect_to, database
from housekeeping.database.queries import UtcDateTimeField
from housekeeping.insight.trends import INTERVALS, Range, read_trends
from housekeeping.web.application import create_app

_WORKERS: Final = 60
_RUNS: Final = 100_000
_REQUESTS: Final = 12
_NAME: Final = "team.worker_0007"
_PAGES: Final = (
    "/",
    f"/workers/{_NAME}",
    "/runs",
    f"/runs?worker={_NAME}&outcome=failed",
    "/runs/50000",
    "/processes",
    "/charts?range=hour",
    "/charts",
    "/charts?range=week",
    f"/charts?range=week&worker={_NAME}",
    "/actions",
)
#: Runs of the last week, evenly spread; of more time if a worker had more than one a minute. One in fifty failed.
_FILL: Final = """
INSERT INTO housekeeping.runs (worker, trigger, started_at, heartbeat_at, finished_at, outcome, counts, backlog)
SELECT 'team.worker_' || to_char(n %% %(workers)s, 'FM0999'), 'schedule', at, at + interval '2 s', at + interval '2 s',
       CASE WHEN n %% 50 = 0 THEN 'failed' ELSE 'done' END, jsonb_build_object('deleted_rows', n %% 1000), n %% 500
FROM generate_series(1, %(runs)s) AS n,
LATERAL (SELECT now() - interval '3 s' - (%(runs)s - n) / %(runs)s::float
         * greatest(interval '7 days', interval '1 minute' * (%(runs)s / %(workers)s))) AS began (at)
"""


class Old(BaseModel):
    """Table that all workers of the measurement clean."""

    id = BigAutoField()
    at = UtcDateTimeField(index=True)

    class Meta:
        table_name = "old"


def sweeps(workers: int) -> dict[str, Sweep]:
    """Return a number of workers of one table."""
    declared = [
        Sweep(
            f"team.worker_{number:04}",
            Rows(Old, stale=lambda row, now: row.at <= now, order="at", action=Delete()),
            schedule="* * * * *",
            limits=Limits(runtime=timedelta(seconds=30)),
        )
        for number in range(workers)
    ]
    return {each.name: each for each in declared}


def fill(connection: Connection, runs: int, workers: int) -> None:
    """Add a number of runs of these workers to the ledger."""
    with connection.cursor() as cursor:
        cursor.execute(_FILL, {"runs": runs, "workers": workers})


@click.command()
def main() -> None:
    """Measure the pages on temporary servers: the median of some requests, after the first one."""
    with started(durable=True) as servers:
        name = Stage(servers).template("pages", [Old], lambda made: fill(made, _RUNS, _WORKERS))
        settings = Settings.load(database_url=servers.database_url(name), redis_url=servers.redis_url)
        logs.configure("ERROR", "json")
        database.initialize(connect_to(settings.require_database_url()))
        declared = sweeps(_WORKERS)
        client = create_app(
            settings, declared, "a-token-of-the-benchmark-of-all-pages", open_to_read=True
        ).test_client()
        click.echo(f"{'page':48} {'ms':>7} {'kB':>7} {'kB gzip':>8} {'B unchanged':>12}")
        for page in _PAGES:
            _measure(client, page)
        for length in INTERVALS:
            _measure_trends(declared, length)
        database.close()


def _measure(client: FlaskClient, page: str) -> None:
    def get(**headers: str) -> TestResponse:
        return client.get(page, headers=headers)

    plain, packed = get(), get(**{"Accept-Encoding": "gzip"})
    assert plain.status_code == 200, plain.get_data(as_text=True)
    times = []
    for _ in range(_REQUESTS):
        began = time.perf_counter()
        get()
        times.append(time.perf_counter() - began)
    unchanged = get(**{"If-None-Match": get().headers.get("ETag", "")})
    size = len(unchanged.data) if unchanged.status_code == 304 else -1
    sizes = f"{len(plain.data) / 1000:7.1f} {len(packed.data) / 1000:8.1f} {size:12}"
    click.echo(f"{page:48} {median(times) * 1000:7.1f} {sizes}")


def _measure_trends(declared: dict[str, Sweep], length: Range) -> None:
    """Measure the query of a chart, which the page makes sixty times in an interval at most."""
    times = []
    for _ in range(_REQUESTS):
        began = time.perf_counter()
        read_trends([MAIN], declared.values(), length, datetime.now(UTC))
        times.append(time.perf_counter() - began)
    click.echo(f"{f'trends of a {length}':48} {median(times) * 1000:7.1f}")


if __name__ == "__main__":
    main()
