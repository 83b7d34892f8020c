"""Command ``python -m benchmarks.queues``: the library's actors and other task queues, on the same Redis."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import click
import psutil
import redis

from benchmarks import report
from benchmarks.comparison import Comparison
from benchmarks.meters import Meters
from benchmarks.queue_programs import PROGRAMS
from benchmarks.rounds import Outcome, Turn, answer, process
from benchmarks.servers import Stage, started

_REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt")
_PROGRAM: Final = "from benchmarks.queue_programs import main; main()"
_VERSIONS: Final = """
import importlib.metadata, json, sys
found = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))
"""
#: Slow contestants -> divisor of their number of messages, because only the speed is compared.
_PARTS: Final = {
    **{"rq": 4, "rq, unique job ids": 4, "rq, a process for each job": 20},
    # It reads at most 100 jobs every half second.
    **{"arq": 10, "arq, job ids of the sender": 10},
}
_LONGEST_S: Final = 300


@click.command()
@click.option("--python", default=sys.executable, help="Interpreter with the other queues; by default the current one.")
@click.option(
    "--contestant",
    multiple=True,
    type=click.Choice(list(PROGRAMS)),
    help="Contestant to run; can be repeated; by default all.",
)
@click.option("--rows", type=click.IntRange(100), default=10_000, show_default=True, help="Number of messages.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Turns of each contestant.")
@click.option("--write-page", is_flag=True, help="Write the figures into the documentation.")
def main(python: str, contestant: tuple[str, ...], rows: int, rounds: int, write_page: bool) -> None:
    """Send and process messages that do nothing with each queue. Skips queues that are not installed."""
    interpreters = _interpreters(python, contestant)
    with started(durable=False) as servers:
        conditions = report.machine(servers) | {"other queues": _described(python)}
        conditions["messages"] = f"{rows:,}, one worker process, {rounds} rounds"
        outcomes = compare(Stage(servers), interpreters, rows, rounds)
    report.show(conditions, outcomes, {}, costs=True)
    if write_page:
        report.write_page(conditions, outcomes, {}, part="queues")


def compare(stage: Stage, interpreters: dict[str, str], rows: int, rounds: int) -> list[Outcome]:
    """Run the turns of every contestant. In each turn it sends messages, and then a worker processes them.

    Parameters:
      interpreters: Contestant -> its interpreter.

    Raises:
      RuntimeError: A contestant failed, or did not process its messages within five minutes.
    """
    outcomes = [
        Outcome(Comparison(name=name, contestants={}, targets={}, undone="")) for name in ("enqueue", "process")
    ]
    names = list(interpreters)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            click.echo(f"{name} ...", err=True)
            turns = _turns(stage, name, interpreters[name], max(1, rows // _PARTS.get(name, 1)))
            for outcome, turn in zip(outcomes, turns, strict=True):
                outcome.turns.setdefault(name, []).append(turn)
    return outcomes


def _turns(stage: Stage, name: str, python: str, rows: int) -> tuple[Turn, Turn]:
    client = redis.Redis.from_url(stage.servers.redis_url)
    client.flushall()  # temporary server
    command = (python, "-c", _PROGRAM)
    with tempfile.TemporaryDirectory() as created, stage.connected() as admin:
        folder = Path(created)
        pipe = folder / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        meters = Meters(admin, client, stage.servers.postmaster)
        told = {"contestant": name, "redis_url": stage.servers.redis_url, "rows": rows, "pipe": str(pipe)}
        with process(folder, command) as sender:
            assert sender.stdin is not None
            answer(sender, json.dumps(told | {"sends": True}), folder)
            before = meters.read("postgres")
            took: dict[str, Any] = json.loads(answer(sender, "go", folder))
            sent = meters.read("postgres").since(before)
            sender.stdin.close()
        with process(folder, command) as worker:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(told | {"sends": False}) + "\n")
            worker.stdin.flush()
            try:
                _wait_for(reader, 1, folder)  # the start of the worker is not measured
                before, own, began = meters.read("postgres"), _own_seconds(worker.pid), time.perf_counter()
                _wait_for(reader, rows - 1, folder)
                seconds, own = time.perf_counter() - began, _own_seconds(worker.pid) - own
                cost = meters.read("postgres").since(before)
                resident = sum(each.memory_info().rss for each in _tree(worker.pid))
            finally:
                for each in _tree(worker.pid):
                    each.kill()
        os.close(reader)
    client.close()
    return (
        Turn(rows, took["seconds"], took["own_seconds"], took["resident_bytes"], sent),
        Turn(rows - 1, seconds, own, resident, cost),
    )


def _wait_for(reader: int, number: int, folder: Path) -> None:
    """Read a number of bytes from the pipe, one for each processed message."""
    ends_at = time.monotonic() + _LONGEST_S
    while number > 0:
        select.select([reader], [], [], 0.05)
        with suppress(BlockingIOError):
            number -= len(os.read(reader, number))
        if time.monotonic() > ends_at:
            log = (folder / "log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"a worker has not processed {number} messages within {_LONGEST_S} s: {log}")


def _tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _own_seconds(pid: int) -> float:
    """Return the CPU time of a process and of all its child processes, including ended ones."""
    return sum(sum(each.cpu_times()[:4]) for each in _tree(pid))


def _interpreters(python: str, only: tuple[str, ...]) -> dict[str, str]:
    """Return contestant -> interpreter of those that can run; print how to install the others."""
    installed = _versions(python, {package for package, _ in PROGRAMS.values()})
    missing = sorted(name for name, version in installed.items() if version is None and name != "dramatiq")
    if missing:
        click.echo(
            f"{', '.join(missing)} not installed in {python}; left out. To add them:\n"
            f"  python -m venv queues && queues/bin/pip install -r {_REQUIREMENTS}\n"
            "  python -m benchmarks.queues --python queues/bin/python",
            err=True,
        )
    found = {}
    for name, (package, _) in PROGRAMS.items():
        if (not only or name in only) and package not in missing:
            found[name] = sys.executable if package == "dramatiq" else python
    return found


def _versions(python: str, packages: set[str]) -> dict[str, str | None]:
    done = subprocess.run([python, "-c", _VERSIONS, *sorted(packages)], capture_output=True, text=True, check=True)
    versions: dict[str, str | None] = json.loads(done.stdout)
    return versions


def _described(python: str) -> str:
    packages = {package for package, _ in PROGRAMS.values()} | {"taskiq", "redis", "hiredis"}
    versions = _versions(python, packages - {"dramatiq"})
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)


if __name__ == "__main__":
    main()
