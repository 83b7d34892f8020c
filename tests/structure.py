"""Figures of the package's structure, and the number of files that a reader opens: ``python -m tests.structure``.

Lines are all lines of the files whose names end in `SOURCES`, blank lines and docstrings included. Functions include
methods and inner functions; a decorator is not one of a function's lines.

A file counts as opened when one of its functions is entered. Module bodies, calls during an import, templates and
background threads do not count. Declarations are loaded before.

==============  =======================================================================================================
Tick to commit  From periodiq's question whether `WORKER` is due until another session sees that its one stale row is
                gone: the scheduler's thread, then those of a Dramatiq worker that has just started. What ends the run
                comes later.
Second run      The worker's threads alone, in a process that has run `WORKER` before and so has filled its caches
Send            ``actor.send()`` with ``deduplicate="until_executed"``, until it returns
Plan            The function behind ``housekeeping plan``, without the reading of settings and the printing
Page            ``GET /`` through Flask's test client with one worker, and the threads that read the snapshot for it
Request         The same without these threads
Imports         Modules of the package after ``import housekeeping.app``, itself included
==============  =======================================================================================================

Each is measured in a new process (only the second run follows the first one), on servers of its own.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Final

import click
from psycopg2.extensions import connection as Connection

import housekeeping

#: Endings of source files.
SOURCES: Final = (".py", ".lua", ".sql")
WORKER: Final = "user_status_cleanup.batch"
#: Folder of the package.
ROOT: Final = Path(housekeeping.__file__).parent
_PATIENCE_MS: Final = 60_000


@dataclasses.dataclass(frozen=True)
class Package:
    """Folder or module directly below the root."""

    name: str
    files: int
    lines: int


@dataclasses.dataclass(frozen=True)
class Static:
    """Figures that are read from the files."""

    lines: int
    files: int
    median_file: float
    longest_file: int
    longest_file_name: str
    classes: int
    dataclasses: int
    functions: int
    mean_function: float
    packages: tuple[Package, ...]


@dataclasses.dataclass(frozen=True)
class Opened:
    """Names of the files that are opened, and the number of imported modules."""

    tick_to_commit: tuple[str, ...]
    second_run: tuple[str, ...]
    send: tuple[str, ...]
    plan: tuple[str, ...]
    page: tuple[str, ...]
    request: tuple[str, ...]
    imports: int


def static(root: Path) -> Static:
    """Return the figures of the package in this folder."""
    lengths = {path.relative_to(root): len(_text(path).splitlines()) for path in _sources(root)}
    nodes = [node for path in _sources(root) if path.suffix == ".py" for node in ast.walk(ast.parse(_text(path)))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    longest = max(lengths, key=lambda path: lengths[path])
    packages: dict[str, list[int]] = {}
    for path, length in lengths.items():
        packages.setdefault(path.parts[0], []).append(length)
    return Static(
        lines=sum(lengths.values()),
        files=len(lengths),
        median_file=median(lengths.values()),
        longest_file=lengths[longest],
        longest_file_name=longest.as_posix(),
        classes=len(classes),
        dataclasses=sum(any("dataclass" in ast.unparse(each) for each in node.decorator_list) for node in classes),
        functions=len(functions),
        mean_function=round(sum(functions) / len(functions), 1) if functions else 0.0,
        packages=tuple(Package(name, len(each), sum(each)) for name, each in sorted(packages.items())),
    )


def _sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in SOURCES)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


class _Recorder:
    """Profile function that notes the files whose functions are entered.

    Parameters:
      is_over: Asked before a new file is noted. Once it returns True, nothing is noted anymore.
    """

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self._is_over = is_over
        self._lock = threading.Lock()
        self._files: set[str] = set()
        self.active = False

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted(Path(name).relative_to(ROOT).as_posix() for name in self._files))

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not self.active or name in self._files:
            return
        if not name.startswith(f"{ROOT}{os.sep}") or not name.endswith(SOURCES):
            return
        # Only the code of functions is optimized, not that of modules and classes.
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or _is_importing(frame):
            return
        with self._lock:
            self.active = self.active and not self._is_over()
            if self.active:
                self._files.add(name)

    def begin(self) -> None:
        """Forget what was noted, and note what the followed threads enter from now on."""
        self._files.clear()
        self.active = True

    @contextmanager
    def following(self) -> Iterator[None]:
        """Begin, and follow this thread within the block."""
        self.begin()
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)

    def follow_workers(self) -> None:
        """Follow the threads of Dramatiq's workers that start from now on."""

        def follow(frame: FrameType, event: str, arg: object) -> None:
            of_worker = type(threading.current_thread()).__module__ == "dramatiq.worker"
            sys.setprofile(self if of_worker else None)

        threading.setprofile(follow)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _add_stale_row() -> Connection:
    """Add a stale row, and return a connection in autocommit."""
    import psycopg2

    admin: Connection = psycopg2.connect(os.environ["HOUSEKEEPING_DATABASE_URL"])
    admin.autocommit = True
    with admin.cursor() as cursor:
        cursor.execute("INSERT INTO user_statuses (user_id, clear_status_at) VALUES (1, now() - interval '1 hour')")
    return admin


def _two_runs() -> tuple[tuple[str, ...], tuple[str, ...]]:
    import periodiq
    from dramatiq import Worker

    from housekeeping import app

    actor, admin = app.actors[WORKER], _add_stale_row()

    def is_committed() -> bool:
        with admin.cursor() as cursor:
            cursor.execute("SELECT NOT EXISTS (SELECT FROM user_statuses)")
            return bool(cursor.fetchone() == (True,))

    def finish() -> tuple[str, ...]:
        app.broker.join(actor.queue_name, timeout=_PATIENCE_MS)
        worker.join()
        recorder.active = False
        assert is_committed(), f"{WORKER} has not deleted its stale row"
        return recorder.files

    recorder = _Recorder(is_committed)
    recorder.follow_workers()
    worker = Worker(app.broker, worker_threads=1)
    app.broker.emit_after("process_boot")
    worker.start()
    now = datetime.now(UTC)
    with recorder.following():
        due = [actor] if actor.options["periodic"].validate(now) else []
        periodiq.Scheduler([actor]).send_actors(due, now)
    first = finish()
    _add_stale_row()
    recorder.begin()
    actor.send()
    second = finish()
    worker.stop()
    return first, second


def _send() -> tuple[str, ...]:
    import dramatiq

    from housekeeping import app

    def work(number: int) -> None:
        """Do nothing; the message is only sent."""

    actor = dramatiq.actor(broker=app.broker, idempotent=True, deduplicate="until_executed")(work)
    recorder = _Recorder()
    with recorder.following():
        actor.send(1)
    return recorder.files


def _plan() -> tuple[str, ...]:
    from housekeeping import app
    from housekeeping.insight.plan import plan

    sweep: Any = app.actors[WORKER].options["sweep"]
    _add_stale_row()
    recorder = _Recorder()
    with recorder.following():
        planned = plan(sweep)
    assert planned.stale.rows == 1
    return recorder.files


def _page(with_threads: bool) -> tuple[str, ...]:
    from housekeeping import app
    from housekeeping.core.settings import Settings
    from housekeeping.web.application import create_app

    sweeps: dict[str, Any] = {WORKER: app.actors[WORKER].options["sweep"]}
    client = create_app(Settings.load(), sweeps, "a-token-that-no-page-asks-for-here", open_to_read=True).test_client()
    recorder = _Recorder()
    if with_threads:
        threading.setprofile(recorder)
    with recorder.following():
        answer = client.get("/")
    recorder.active = False
    assert answer.status_code == 200, answer.get_data(as_text=True)
    return recorder.files


def _imports() -> int:
    importlib.import_module("housekeeping.app")
    return sum(name.split(".")[0] == "housekeeping" for name in sys.modules)


def opened() -> Opened:
    """Measure on embedded servers, each time in a new process."""
    from housekeeping import embedded

    with embedded.start() as servers:
        for name in [name for name in os.environ if name.startswith("HOUSEKEEPING_")]:
            del os.environ[name]
        os.environ["HOUSEKEEPING_DATABASE_URL"] = servers.database_url
        os.environ["HOUSEKEEPING_REDIS_URL"] = servers.redis_url
        subprocess.run([sys.executable, "-m", "housekeeping", "init", "--with-tables"], check=True, capture_output=True)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as new_process:
            tick_to_commit, second_run = new_process.submit(_two_runs).result()
            return Opened(
                tick_to_commit=tick_to_commit,
                second_run=second_run,
                send=new_process.submit(_send).result(),
                plan=new_process.submit(_plan).result(),
                page=new_process.submit(_page, with_threads=True).result(),
                request=new_process.submit(_page, with_threads=False).result(),
                imports=new_process.submit(_imports).result(),
            )


def table(figures: Static, found: Opened | None) -> str:
    """Return the figures as a table."""
    rows = [
        ("lines", f"{figures.lines:,}", ""),
        ("files", f"{figures.files:,}", ""),
        ("median file", f"{figures.median_file:g}", ""),
        ("longest file", f"{figures.longest_file:,}", figures.longest_file_name),
        ("classes", f"{figures.classes:,}", f"{figures.dataclasses:,} of them dataclasses"),
        ("functions", f"{figures.functions:,}", f"{figures.mean_function:g} lines on average"),
    ]
    if found is not None:
        rows += [
            ("files from tick to commit", f"{len(found.tick_to_commit)}", ""),
            ("files of a second run", f"{len(found.second_run)}", "in the worker"),
            ("files of a send", f"{len(found.send)}", "with deduplication"),
            ("files of a plan", f"{len(found.plan)}", ""),
            ("files of a page", f"{len(found.page)}", f"{len(found.request)} of them in the request's thread"),
            ("modules that the app imports", f"{found.imports}", ""),
        ]
    rows += [
        (f"  {each.name}", f"{each.lines:,}", f"{each.files} file{'s' if each.files > 1 else ''}")
        for each in figures.packages
    ]
    return "\n".join(f"{name:30}{value:>8}  {note}".rstrip() for name, value, note in rows)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the names of the opened files.")
@click.option("--static", "only_static", is_flag=True, help="Only read the files; start no servers.")
def main(as_json: bool, only_static: bool) -> None:
    """Print the figures of the package housekeeping."""
    figures, found = static(ROOT), None if only_static else opened()
    if as_json:
        both = dataclasses.asdict(figures) | {"opened": found and dataclasses.asdict(found)}
        click.echo(json.dumps(both, indent=2))
    else:
        click.echo(table(figures, found))


if __name__ == "__main__":
    main()
