"""Workers in two databases on two servers: what commands show, and what happens while one server is down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg2
import pytest

from tests.acceptance.pages import in_a_shell, with_programs
from tests.acceptance.processes import SCHEDULER, WORKER, eventually, started
from tests.command_processes import CommandProcesses
from tests.internals.embedded import Servers, embedded
from tests.unit.docs.blocks import ROOT, blocks

pytestmark = pytest.mark.slow

PAGE: Final = ROOT / "docs/howto/several-databases.md"
STATUSES: Final = "user_status_cleanup.batch"
BUILDS: Final = "ci.stuck_builds.drop_canceling"
CI_WORKERS: Final = (
    "ci.stuck_jobs",
    "ci.stuck_builds.drop_pending",
    "ci.stuck_builds.drop_running",
    "ci.stuck_builds.drop_scheduled",
    BUILDS,
)
#: The two workers of the tests run every minute; the other ones of their families do not run.
EVERY_MINUTE: Final = {
    STATUSES: {"schedule": "* * * * *"},
    **{name: {"database": "ci", "enabled": False} for name in CI_WORKERS},
    BUILDS: {"database": "ci", "schedule": "* * * * *", "lease_ttl_s": 30, "max_runtime_s": 20},
}


@dataclass(frozen=True)
class TwoServers:
    """Two PostgreSQL servers, with the databases main and ci, and a Redis.

    Attributes:
      environment: Names them in settings.
    """

    main: Servers
    ci: Servers
    environment: dict[str, str]
    folder: Path
    processes: CommandProcesses

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``housekeeping``."""
        return self.processes.run(list(arguments), self.environment, self.folder, timeout_s=60)

    def document(self, *arguments: str) -> Any:
        """Return what a command prints with ``--json``."""
        return json.loads(self.command(*arguments, "--json").stdout)


def query(servers: Servers, sql: str) -> list[tuple[Any, ...]]:
    connection = psycopg2.connect(servers.database_url)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(sql)
        rows = cursor.fetchall() if cursor.description else []
    connection.close()
    return rows


def add_status(servers: Servers, user_id: int) -> None:
    query(servers, f"INSERT INTO user_statuses (user_id, clear_status_at) VALUES ({user_id}, now() - interval '1 day')")


def add_build(servers: Servers) -> None:
    query(
        servers,
        "INSERT INTO ci_builds (type, status, project_id, commit_id, created_at, updated_at) "
        "VALUES ('Ci::Build', 'canceling', 1, 1, now() - interval '2 days', now() - interval '2 days')",
    )


def runs_in(servers: Servers) -> list[tuple[Any, ...]]:
    return query(servers, "SELECT worker, outcome FROM housekeeping.runs ORDER BY id")


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Servers, Servers]]:
    with embedded.start() as main, embedded.start(redis=False) as ci:
        yield main, ci


@pytest.fixture
def two(servers: tuple[Servers, Servers], command_processes: CommandProcesses, tmp_path: Path) -> Iterator[TwoServers]:
    """Both databases with the tables of their workers, and one stale row each."""
    main, ci = servers
    folder = tmp_path / "operator"
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOUSEKEEPING_")}
    environment = kept | {
        "HOUSEKEEPING_DATABASE_URL": main.database_url,
        "HOUSEKEEPING_DATABASES": json.dumps({"ci": ci.database_url}),
        "HOUSEKEEPING_REDIS_URL": main.redis_url,
        "HOUSEKEEPING_LOG_FORMAT": "json",
        "HOUSEKEEPING_BUILT_IN": "user_status_cleanup,ci_stuck_builds",
        "HOUSEKEEPING_WORKERS": json.dumps(EVERY_MINUTE),
        "COLUMNS": "250",
    }
    found = TwoServers(main, ci, environment, folder, command_processes)
    created = found.command("init", "--with-tables")
    assert created.returncode == 0, created.stderr
    add_status(main, 1)
    add_build(ci)
    yield found
    for each in (main, ci):
        if not _is_up(each):
            each.start("postgres")
        query(each, "DROP SCHEMA IF EXISTS housekeeping CASCADE; DROP SCHEMA public CASCADE; CREATE SCHEMA public")


def _is_up(servers: Servers) -> bool:
    try:
        query(servers, "SELECT 1")
    except psycopg2.OperationalError:
        return False
    return True


def test_run_and_its_ledger_row_are_in_the_workers_database(two: TwoServers) -> None:
    result = two.document("run", BUILDS)

    assert (result["outcome"], runs_in(two.main), runs_in(two.ci)) == ("done", [], [(BUILDS, "done")])
    assert query(two.ci, "SELECT status FROM ci_builds") == [("failed",)]
    assert query(two.main, "SELECT to_regclass('ci_builds')") == [(None,)]


def test_commands_show_one_list_with_the_databases(two: TwoServers) -> None:
    two.command("run", BUILDS)
    two.command("run", STATUSES)

    status, listed, runs = (two.command(name).stdout for name in ("status", "list", "runs"))
    databases = {each["worker"]: each["database"] for each in two.document("status")["workers"]}
    explained = two.command("runs", "ci:1")
    unknown = two.command("runs", "ci:7")

    assert (databases[STATUSES], databases[BUILDS], databases["housekeeping.old_runs.ci"]) == ("main", "ci", "ci")
    for text in (status, listed):
        assert f"{BUILDS} ci" in " ".join(text.split())
    assert [line.split()[:2] for line in runs.splitlines()[1:3]] == [["1", STATUSES], ["ci:1", BUILDS]]
    assert f"run ci:1 of {BUILDS}: done" in explained.stdout
    assert "there is no run 7 in the database 'ci'" in unknown.stderr


def test_workers_of_one_family_in_two_databases_are_refused_with_one_line(two: TwoServers) -> None:
    two.environment["HOUSEKEEPING_WORKERS"] = json.dumps({BUILDS: {"database": "ci"}})
    mixed = two.command("list")
    two.environment["HOUSEKEEPING_WORKERS"] = json.dumps({STATUSES: {"database": "cii"}})
    unknown = two.command("list")

    assert (mixed.returncode, len(mixed.stderr.splitlines())) == (2, 1)
    assert "both use the table ci_builds, so they need the same one" in mixed.stderr
    assert (
        f'["{STATUSES}"]["database"] is \'cii\'; the databases are main, ci (HOUSEKEEPING_DATABASES)' in unknown.stderr
    )


def test_unavailable_database_affects_only_its_own_workers(two: TwoServers) -> None:
    two.ci.stop("postgres")

    status, doctor = two.command("status"), two.document("doctor")
    asked = two.command("status", "--fail-on-alert")
    other, failed = two.document("run", STATUSES), two.command("run", BUILDS)
    paused, runs = two.command("pause", "--all"), two.command("runs")

    assert (status.returncode, asked.returncode, other["outcome"], failed.returncode) == (0, 1, "done", 1)
    assert STATUSES in status.stdout and "UNAVAILABLE the database 'ci' did not answer" in status.stdout
    assert two.document("status")["databases"]["main"] == "ok"
    levels = {(each["area"], each["subject"]): each["level"] for each in doctor["findings"]}
    assert (levels["postgres ci", "connection"], levels["postgres main", "schema"]) == ("error", "fine")
    assert f"{STATUSES} is paused" in paused.stdout and paused.returncode == 1
    assert STATUSES in runs.stdout and "the database 'ci' did not answer" in runs.stderr


def test_status_fails_without_main_and_shows_the_other_database(two: TwoServers) -> None:
    two.main.stop("postgres")

    status, document, run = two.command("status"), two.document("status"), two.document("run", BUILDS)

    assert (status.returncode, run["outcome"]) == (1, "done")
    assert BUILDS in status.stdout and "UNAVAILABLE the database 'main' did not answer" in status.stdout
    assert {each["database"] for each in document["workers"]} == {"ci"}
    assert document["databases"]["ci"] == "ok" and document["clock_skew_s"] is None


@pytest.mark.parametrize("away", ["ci", "main"])
def test_processes_continue_with_the_other_database(two: TwoServers, away: str) -> None:
    gone, there = (two.ci, two.main) if away == "ci" else (two.main, two.ci)
    lost, living = (BUILDS, STATUSES) if away == "ci" else (STATUSES, BUILDS)
    scheduler = [*SCHEDULER, "housekeeping.app"]
    worker = [*WORKER, "housekeeping.app", "-p", "1", "-t", "2"]

    def ended(servers: Servers, name: str) -> int:
        return sum(each == (name, "done") for each in runs_in(servers))

    with (
        started(scheduler, two.environment, two.folder / "scheduler.log") as scheduling,
        started(worker, two.environment, two.folder / "worker.log") as working,
    ):
        eventually(lambda: ended(gone, lost) and ended(there, living), scheduling, working, patience_s=150)
        gone.kill("postgres")
        before = ended(there, living)
        # The next tick is there, and the one after it.
        eventually(lambda: ended(there, living) >= before + 2, scheduling, working, patience_s=200)
        gone.start("postgres")
        done = ended(gone, lost)
        eventually(lambda: ended(gone, lost) > done, scheduling, working, patience_s=200)
        gaps = query(gone, f"SELECT count(*) FROM housekeeping.runs WHERE worker = '{lost}' AND outcome = 'missed'")

    assert gaps == [(0,)]  # each tick was sent, and its message failed or was retried


def test_worker_starts_and_runs_while_main_is_unavailable(two: TwoServers) -> None:
    two.main.stop("postgres")
    worker = [sys.executable, "-m", "housekeeping", "worker", "-p", "1", "-t", "2"]

    with started(worker, two.environment, two.folder / "worker.log") as working:
        sent = two.command("enqueue", BUILDS)
        eventually(lambda: (BUILDS, "done") in runs_in(two.ci), working)
        status = working.terminate()

    assert (sent.returncode, status) == (0, 0), working.text()


def test_process_without_redis_serves_each_database_that_answers(two: TwoServers) -> None:
    del two.environment["HOUSEKEEPING_REDIS_URL"]
    two.ci.stop("postgres")

    with started([sys.executable, "-m", "housekeeping", "serve"], two.environment, two.folder / "serve.log") as serving:
        # Their ticks are sent before and after that of the other database's worker.
        for worker in (STATUSES, "housekeeping.outbox"):
            eventually(lambda of=worker: (of, "done") in runs_in(two.main), serving)  # type: ignore[misc]
        two.ci.start("postgres")
        eventually(lambda: (BUILDS, "done") in runs_in(two.ci), serving)
        status = serving.terminate()

    assert status == 0, serving.text()
    assert query(two.ci, "SELECT status FROM ci_builds") == [("failed",)]


def followed(text: str, two: TwoServers) -> str:
    """Run a block of shell commands; return what it prints."""
    text = text.replace("postgresql://user:password@main-host:5432/app", two.main.database_url)
    text = text.replace("postgresql://user:password@ci-host:5432/ci", two.ci.database_url)
    text = text.replace("redis://host:6379/0", two.main.redis_url)
    kept = {name: value for name, value in two.environment.items() if not name.startswith("HOUSEKEEPING_")}
    return in_a_shell(text, with_programs(kept, two.processes.folder), two.folder)


def test_page_leads_from_two_fresh_servers_to_runs_in_both(two: TwoServers) -> None:
    for each in (two.main, two.ci):
        query(each, "DROP SCHEMA IF EXISTS housekeeping CASCADE; DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    name, assign, *commands = (each.text for each in blocks(PAGE) if each.kind == "sh")
    shown = next(each.text for each in blocks(PAGE) if each.kind == "text")

    said = [followed(name + assign + each, two) for each in commands]

    assert said[0] == shown
    assert runs_in(two.main)[-1] == (STATUSES, "done")
    assert runs_in(two.ci) == [(BUILDS, "done")]
    assert "run ci:1" in said[-1]
