"""Command ``python -m benchmarks.idle``: what the processes of an installation use while no sweep finds a row."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Any, Final

import click
import psutil
import redis

from benchmarks import pages, report
from benchmarks.meters import Meters
from benchmarks.servers import Servers, Stage, extend, started
from housekeeping.core.settings import PREFIX

_MODULE: Final = "from benchmarks.pages import sweeps\nSWEEPS = tuple(sweeps({number}).values())\n"
_ENDED: Final = "SELECT count(*) FROM housekeeping.runs WHERE outcome = 'done'"
#: Ticks of each sweep before the measurement, so that statements are compiled and prepared.
_WARM_TICKS: Final = 2
_PATIENCE_S: Final = 300
_KINDS: Final[dict[str, Sequence[Sequence[str]]]] = {
    "scheduler and one worker process": (["scheduler"], ["worker", "-p", "1", "-t", "4"]),
    "serve, without Redis": (["serve", "--threads", "4"],),
}
_HEADS: Final = (
    *("processes", "sweeps", "% of one core", "of it PostgreSQL and Redis", "statements a second"),
    "Redis commands a second",
)


@click.command()
@click.option(
    "--sweeps", "number", type=click.IntRange(1), default=60, show_default=True, help="Each runs every minute."
)
@click.option("--minutes", type=click.IntRange(1), default=3, show_default=True, help="Duration of the measurement.")
@click.option("--write-page", is_flag=True, help="Write the figures into the documentation.")
def main(number: int, minutes: int, write_page: bool) -> None:
    """Measure an installation whose sweeps find no rows, on temporary servers."""
    with started(durable=True) as servers:
        conditions = report.machine(servers) | {"duration": f"{minutes} min"}
        lines = [_measure(servers, kind, number, minutes) for kind in _KINDS]
    report.show_table(conditions, _HEADS, lines)
    if write_page:
        report.write_part("idle", conditions, [(_HEADS, lines)])


def _measure(servers: Servers, kind: str, number: int, minutes: int) -> list[str]:
    click.echo(f"{kind} ...", err=True)
    stage = Stage(servers)
    template = stage.template("idle", [pages.Old], lambda made: None)
    client = redis.Redis.from_url(servers.redis_url)
    client.flushall()  # temporary server
    with ExitStack() as stack:
        name, folder = stack.enter_context(stage.copy_of(template)), stack.enter_context(tempfile.TemporaryDirectory())
        admin = stack.enter_context(stage.connected())
        extend(admin, "pg_stat_statements")
        (Path(folder) / "idle_sweeps.py").write_text(_MODULE.format(number=number))
        environment = _environment(servers, name, Path(folder), without_redis="serve" in kind)
        programs = [stack.enter_context(_program(each, environment, Path(folder))) for each in _KINDS[kind]]
        _wait_for_runs(stage, name, _WARM_TICKS * number, programs)
        meters = Meters(admin, client, servers.postmaster)
        before, began, own = meters.read(name), time.monotonic(), _processor_seconds(programs)
        time.sleep(60 * minutes)
        cost, seconds = meters.read(name).since(before), time.monotonic() - began
        own = _processor_seconds(programs) - own
    client.close()
    statements = "not counted" if cost.statements is None else f"{cost.statements / seconds:.1f}"
    percent = f"{100 * (own + cost.server_seconds) / seconds:.1f}", f"{100 * cost.server_seconds / seconds:.1f}"
    return [kind, str(number), *percent, statements, f"{cost.redis_commands / seconds:.1f}"]


def _environment(servers: Servers, name: str, folder: Path, *, without_redis: bool) -> dict[str, str]:
    settings = {"DATABASE_URL": servers.database_url(name), "REDIS_URL": servers.redis_url}
    if without_redis:
        del settings["REDIS_URL"]
    settings |= {"SWEEPS": "idle_sweeps", "BUILT_IN": "none", "LOG_LEVEL": "INFO", "LOG_FORMAT": "json"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    path = os.pathsep.join((str(folder), str(Path(__file__).parents[1])))
    return kept | {f"{PREFIX}{key}": value for key, value in settings.items()} | {"PYTHONPATH": path}


@contextmanager
def _program(arguments: Sequence[str], environment: dict[str, str], folder: Path) -> Iterator[Popen[bytes]]:
    with (folder / f"{arguments[0]}.log").open("wb") as log:
        running = Popen([sys.executable, "-m", "housekeeping", *arguments], env=environment, stdout=log, stderr=STDOUT)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(_PATIENCE_S)


def _wait_for_runs(stage: Stage, name: str, number: int, programs: Sequence[Popen[bytes]]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    with stage.connected(name) as connection, connection.cursor() as cursor:
        while True:
            cursor.execute(_ENDED)
            row: Any = cursor.fetchone()
            if row[0] >= number:
                return
            if time.monotonic() > deadline or any(each.poll() is not None for each in programs):
                raise RuntimeError(f"{row[0]} of {number} runs ended, and a process may have failed")
            time.sleep(0.5)


def _processor_seconds(programs: Sequence[Popen[bytes]]) -> float:
    """Return the processor time that the programs and their child processes have used so far."""
    processes = [psutil.Process(each.pid) for each in programs]
    times = [each.cpu_times() for top in processes for each in (top, *top.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


if __name__ == "__main__":
    main()
