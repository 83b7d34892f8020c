"""``housekeeping list``"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import click
from peewee import PeeweeException

from housekeeping.cli.composition import settings_and_logs
from housekeeping.cli.tables import moment, out, span, table
from housekeeping.installation import use_database
from housekeeping.sweeps.overview import next_tick, state_of
from housekeeping.sweeps.switches import paused_workers
from housekeeping.workers import configured_sweeps


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_workers(as_json: bool) -> None:
    """List the workers: schedule, next tick, limits, state.

    Works without a database; whether a worker is paused is then unknown.
    """
    settings = settings_and_logs()
    sweeps = configured_sweeps(settings)
    paused: set[str] | None = None
    if settings.database_url is not None:
        use_database(settings)
        try:
            paused = paused_workers()
        except PeeweeException:
            paused = None
    now = datetime.now(UTC)
    rows: list[dict[str, Any]] = []
    for name, sweep in sweeps.items():
        state = state_of(sweep, paused or set())
        rows.append(
            {
                "worker": name,
                "schedule": sweep.schedule,
                "next_tick": next_tick(sweep, now, settings.timezone),
                "batch_size": sweep.batch_size,
                "max_runtime_s": sweep.max_runtime.total_seconds(),
                "state": "unknown" if paused is None and state == "on" else state,
            }
        )
    if as_json:
        click.echo(json.dumps(rows, default=lambda value: value.isoformat()))
        return
    shown = table("WORKER", "SCHEDULE", "NEXT TICK (UTC)", ">BATCH", ">BUDGET", "STATE")
    for row, sweep in zip(rows, sweeps.values(), strict=True):
        shown.add_row(
            row["worker"],
            row["schedule"] or "-",
            moment(row["next_tick"]),
            str(row["batch_size"]),
            span(sweep.max_runtime),
            row["state"],
        )
    out.print(shown)
