"""``housekeeping pause``, ``housekeeping narrow``, ``housekeeping resume``"""

from __future__ import annotations

import getpass
import socket
from datetime import timedelta

import click

from housekeeping.cli.context import load_workers
from housekeeping.core.errors import WrongArgument
from housekeeping.database.clock_skew import database_now
from housekeeping.database.connection import translate_postgres_errors
from housekeeping.presentation.descriptions import describe_override
from housekeeping.presentation.time_parsing import parse_future_time
from housekeeping.presentation.workers import find_worker
from housekeeping.sweeps.declaration import Sweep
from housekeeping.sweeps.ledger import overrides
from housekeeping.sweeps.ledger.overrides import Override, SwitchState

_UNTIL_HELP = (
    "When it ends by itself: 2h, 30min, 03:00 or 2026-11-20T03:00 (UTC). Without it: by `housekeeping resume`."
)


@click.command(short_help="Let a worker run no more, for a while.")
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Every worker.")
@click.option("--reason", help="Why, for whoever looks next.")
@click.option("--until", help=_UNTIL_HELP)
def pause(name: str | None, every: bool, reason: str | None, until: str | None) -> None:
    """Let worker NAME run no more, for a while.

    Effective at once: a run at work stops after the batch in hand and keeps what it has done; ticks and messages
    that come are recorded as skipped. `housekeeping run NAME --force` runs it all the same.

    \b
    housekeeping pause ci.stuck_builds.drop_canceling --reason "migration of ci_builds" --until 2h
    """
    _switch(name, every, "paused", reason, until)


@click.command(short_help="Let a worker take smaller steps, for a while.")
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Every worker.")
@click.option("--batch-size", type=click.IntRange(1, 10_000), help="At most so many records a batch.")
@click.option("--max-runtime", type=click.FloatRange(0, min_open=True), help="At most so many seconds a run.")
@click.option("--reason", help="Why, for whoever looks next.")
@click.option("--until", help=_UNTIL_HELP)
def narrow(
    name: str | None,
    every: bool,
    batch_size: int | None,
    max_runtime: float | None,
    reason: str | None,
    until: str | None,
) -> None:
    """Let worker NAME take smaller steps, for a while; it never takes larger ones than its own.

    Effective within one batch, for a run at work too. `housekeeping resume NAME` ends it.

    \b
    housekeeping narrow user_status_cleanup.batch --batch-size 10 --max-runtime 5 --until 03:00
    """
    if batch_size is None and max_runtime is None:
        raise WrongArgument("say how narrow: --batch-size, --max-runtime, or both")
    _switch(
        name,
        every,
        "narrow",
        reason,
        until,
        batch_size,
        None if max_runtime is None else timedelta(seconds=max_runtime),
    )


@click.command(short_help="End a pause, or a narrowing.")
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Every worker.")
def resume(name: str | None, every: bool) -> None:
    """End a pause, or a narrowing, of worker NAME: it runs again at its next tick.

    What waited in the meantime was skipped, not queued: the next run finds everything that is stale by then.
    """
    _, sweeps = load_workers()
    for sweep in _chosen(sweeps, name, every):
        with translate_postgres_errors():
            ended = overrides.resume(sweep.name, _who())
        click.echo(f"{sweep.name} {'runs again at its next tick' if ended else 'was neither paused nor narrowed'}")


def _switch(
    name: str | None,
    every: bool,
    state: SwitchState,
    reason: str | None,
    until: str | None,
    batch_size: int | None = None,
    max_runtime: timedelta | None = None,
) -> None:
    _, sweeps = load_workers()
    with translate_postgres_errors():
        ends = None if until is None else parse_future_time(until, database_now())
    for sweep in _chosen(sweeps, name, every):
        said = Override(sweep.name, state, reason, ends, said_by=_who(), batch_size=batch_size, max_runtime=max_runtime)
        with translate_postgres_errors():
            overrides.switch(said)
        click.echo(describe_override(said))


def _chosen(sweeps: dict[str, Sweep], name: str | None, every: bool) -> list[Sweep]:
    if every == (name is not None):
        raise WrongArgument("name one worker, or say --all")
    return list(sweeps.values()) if name is None else [find_worker(sweeps, name)]


def _who() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = "?"
    return f"{user}@{socket.gethostname()}"
