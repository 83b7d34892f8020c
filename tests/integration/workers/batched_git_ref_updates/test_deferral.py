"""Projects whose refs were all rejected, or whose repository is broken: scheduled again after a growing delay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePath

import pytest
from dramatiq.brokers.redis import RedisBroker
from peewee import fn
from prometheus_client import CollectorRegistry
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.integration.workers.batched_git_ref_updates.cleaned import NONE, SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, AddRefs, Explained, Lines, Pending
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository, made
from tests.integration.workers.batched_git_ref_updates.scheduled import drain, enqueued, sized
from tests.integration.workers.batched_git_ref_updates.test_statement_costs import INDEX
from tests.internals.core import Exporter
from tests.internals.database import database
from tests.internals.engine import run_sweep
from tests.internals.insight import Alert, dry_run, worker_status
from tests.internals.ledger import NOW, Rejection
from tests.internals.workers import (
    GitCli,
    PendingDeletions,
    RefsRefused,
    backends,
    cleanup_scheduler,
    deferred_among,
    hashed_path,
    project_cleanup,
)

#: The counts of a run that enqueued one project.
ONE = {"total_projects": 1, "enqueued": 1, "deduplicated": 0}
#: What breaks a repository: a shell command, run before git with the repository as `$GIT_DIR`.
BROKEN = {
    "not_writable": "echo \"fatal: cannot lock ref 'refs/heads/1': Unable to create '$GIT_DIR/refs/heads/1.lock': "
    'Permission denied" >&2; exit 128',
    "disk_error": "echo \"fatal: cannot lock ref 'refs/heads/1': Unable to create '$GIT_DIR/refs/heads/1.lock': "
    'Input/output error" >&2; exit 128',
}


def break_repositories(tmp_path: Path, causes: Mapping[int, str]) -> None:
    """Let git find the repositories of these projects broken."""
    program = tmp_path / "git"
    cases = "".join(f"*{hashed_path(project_id).name}) {BROKEN[cause]};; " for project_id, cause in causes.items())
    program.write_text(f'#!/bin/sh\ncase "$GIT_DIR" in {cases} esac\nexec git "$@"\n')
    program.chmod(0o755)
    backends.replace(deletion=GitCli(str(program)))


@dataclass
class Project:
    """Project 1, whose last run has deferred it: its only ref is locked, or its repository is not writable."""

    is_broken: bool
    repair: Callable[[], object]


@pytest.fixture(params=["locked", "broken"])
def deferred_project(
    request: pytest.FixtureRequest, repository: MakeRepository, add_refs: AddRefs, tmp_path: Path
) -> Project:
    bare = repository("refs/heads/1")
    add_refs("refs/heads/1")
    if request.param == "locked":
        project = Project(False, bare.lock("refs/heads/1").unlink)
    else:
        break_repositories(tmp_path, {1: "not_writable"})
        project = Project(True, lambda: break_repositories(tmp_path, {}))
    run_sweep(project_cleanup, 1)
    return project


def lock_ref_of(repository: MakeRepository, add_refs: AddRefs, project_id: int = 1) -> Path:
    """Give the project one ref to delete, which stays locked; return the lock."""
    lock: Path = repository("refs/heads/a", project_id=project_id).lock("refs/heads/a")
    add_refs("refs/heads/a", project_id=project_id)
    return lock


def let_time_pass() -> None:
    Rejection.update(not_before=NOW - timedelta(seconds=1)).where(Rejection.not_before.is_null(False)).execute()


def test_deferred_project_is_left_out_until_its_delay_has_passed(
    broker: RedisBroker, settings: Settings, deferred_project: Project, add_refs: AddRefs
) -> None:
    add_refs("refs/heads/b", project_id=2)

    planned = dry_run(cleanup_scheduler)
    first = run_sweep(cleanup_scheduler)
    left_out = drain(broker, settings)
    let_time_pass()
    run_sweep(cleanup_scheduler)

    assert (planned.counts["total_projects"], first.counts) == (1, ONE), "of those left out none is counted"
    assert (left_out, enqueued(broker)) == ([2], [1, 2])


def test_new_row_ends_the_delay_unless_the_repository_is_broken(
    broker: RedisBroker, deferred_project: Project, add_refs: AddRefs
) -> None:
    add_refs("refs/heads/new", project_id=2)
    run_sweep(cleanup_scheduler)
    after_row_of_another = enqueued(broker)
    add_refs("refs/heads/new")

    run_sweep(cleanup_scheduler)

    assert (after_row_of_another, enqueued(broker)) == ([2], [2] if deferred_project.is_broken else [1, 2])


def test_deferred_project_that_is_repaired_can_be_run_by_hand(deferred_project: Project, pending: Pending) -> None:
    (recorded,) = Rejection.select()
    deferred_project.repair()

    result = run_sweep(project_cleanup, 1)

    assert (recorded.times, recorded.rows) == (1, 0 if deferred_project.is_broken else 1)
    assert (result.counts["total_deletes"], pending(), list(Rejection.select())) == (1, [], [])


def test_delay_doubles_with_each_run_that_rejects_everything(repository: MakeRepository, add_refs: AddRefs) -> None:
    lock_ref_of(repository, add_refs)
    delays = []

    for _ in range(8):
        run_sweep(project_cleanup, 1)
        row = Rejection.get()
        delays.append(round((row.not_before - row.last_at).total_seconds() / 60))

    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]


def test_project_with_a_processed_row_is_not_deferred(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    lock_ref_of(repository, add_refs)
    add_refs("refs/heads/b")

    run_sweep(project_cleanup, 1)
    run_sweep(cleanup_scheduler)

    assert (Rejection.get().times, Rejection.get().not_before) == (0, None)
    assert enqueued(broker) == [1]


def test_deferred_projects_do_not_use_up_a_run_s_limit(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    for project_id in range(1, 6):
        lock_ref_of(repository, add_refs, project_id)
        run_sweep(project_cleanup, project_id)
    add_refs("refs/heads/a", project_id=6)

    result = run_sweep(sized(max_projects=2, batch_size=2))

    assert (result.outcome, result.counts) == ("done", ONE)
    assert enqueued(broker) == [6]


@pytest.mark.parametrize(("deferred", "projects", "queries"), [(0, 300, 1), (1, 1999, 2)])
def test_deferred_projects_cost_one_statement_per_thousand(
    broker: RedisBroker,
    repository: MakeRepository,
    add_refs: AddRefs,
    add_deletions: AddDeletions,
    statements: list[str],
    deferred: int,
    projects: int,
    queries: int,
) -> None:
    for project_id in range(1, 1 + deferred):
        lock_ref_of(repository, add_refs, project_id)
        run_sweep(project_cleanup, project_id)
    add_deletions(projects, project=f"n + {deferred}")
    statements.clear()

    assert run_sweep(cleanup_scheduler).counts["total_projects"] == projects
    assert len([sql for sql in statements if '"rejections"' in sql and "not_before" in sql]) == queries


def test_new_rows_of_deferred_projects_are_found_by_index(
    add_deletions: AddDeletions, admin: Connection, settings: Settings, explained: Explained
) -> None:
    add_deletions(20_000, project="n % 100")
    with admin.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {settings.schema_name}.rejections "
            "(worker, subject, cause, rows, times, not_before, position) "
            "SELECT 'batched_git_ref_updates.project_cleanup', n, 'x', 1, 1, now() + interval '1 h', '[1000000, 1]' "
            "FROM generate_series(1, 2000) AS n; ANALYZE"
        )

    (text,) = explained(lambda: deferred_among(list(range(100))))

    assert INDEX in text and "Seq Scan on batched" not in text
    assert len(deferred_among(list(range(100)))) == 99


class Refusing:
    """Deletion that refuses these refs and records the others."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)
        self.deleted: list[str] = []

    def delete(self, repository: PurePath, refs: Sequence[str]) -> None:
        if self.refused & set(refs):
            raise RefsRefused("locked")
        self.deleted += refs


def names(first: int, last: int) -> list[str]:
    return [f"refs/heads/{number}" for number in range(first, last + 1)]


def refusing(*refused: str) -> Refusing:
    deletion = Refusing(*refused)
    backends.replace(deletion=deletion)
    return deletion


@pytest.mark.usefixtures("root")
def test_refused_rows_do_not_starve_rows_behind_them(add_deletions: AddDeletions, pending: Pending) -> None:
    # A run handles 30 rows.
    deletion = refusing(*names(1, 70))
    add_deletions(80)

    results = [run_sweep(SMALL, 1) for _ in range(3)]

    assert [(result.reason, result.counts["failed"]) for result in results] == [
        ("limit", 30),
        ("limit", 30),
        ("limit", 20),
    ]
    assert deletion.deleted == names(71, 80)
    assert pending() == names(1, 70)


@pytest.mark.usefixtures("root")
def test_run_that_began_behind_refused_rows_wraps_around(add_deletions: AddDeletions, pending: Pending) -> None:
    deletion = refusing(*names(1, 40))
    add_deletions(45)
    run_sweep(SMALL, 1)
    deletion.refused.clear()

    second, third = run_sweep(SMALL, 1), run_sweep(SMALL, 1)

    assert deletion.deleted == [*names(31, 45), *names(1, 30)]
    assert ((second.outcome, second.reason), (third.outcome, third.reason)) == (("partial", "limit"), ("done", None))
    assert (pending(), list(Rejection.select())) == ([], [])


@pytest.mark.usefixtures("root")
def test_run_that_wrapped_ends_where_it_began(add_deletions: AddDeletions, pending: Pending) -> None:
    deletion = refusing(*names(1, 30))
    add_deletions(31)
    run_sweep(SMALL, 1)
    deletion.refused = set(names(1, 29))

    second, third = run_sweep(SMALL, 1), run_sweep(SMALL, 1)

    assert (second.outcome, third.outcome) == ("partial", "done")
    assert second.counts == third.counts == {**NONE, "total_deletes": 1, "failed": 29}
    assert pending() == names(1, 29)


@pytest.mark.usefixtures("root")
def test_project_with_more_refused_rows_than_a_run_handles_is_deferred(
    broker: RedisBroker, settings: Settings, add_deletions: AddDeletions, add_refs: AddRefs
) -> None:
    refusing(*names(1, 40), "refs/heads/new")
    add_deletions(40)
    run_sweep(SMALL, 1)
    run_sweep(cleanup_scheduler)
    half_way = drain(broker, settings)
    run_sweep(SMALL, 1)
    run_sweep(cleanup_scheduler)
    after_all = enqueued(broker)
    add_refs("refs/heads/new")
    run_sweep(cleanup_scheduler)

    assert (half_way, after_all, enqueued(broker)) == ([1], [], [1])


@pytest.fixture
def project_refs(repository: MakeRepository, add_refs: AddRefs) -> Callable[[], None]:
    """Add a row to each of five projects."""
    for project_id in range(1, 6):
        repository("refs/heads/1", project_id=project_id)

    def add() -> None:
        for project_id in range(1, 6):
            add_refs("refs/heads/1", project_id=project_id)

    return add


def test_failures_of_a_project_end_with_a_run_that_reached_its_limit(
    root: Path, add_deletions: AddDeletions, tmp_path: Path
) -> None:
    made(root, 1, "refs/heads/1")
    break_repositories(tmp_path, {1: "not_writable"})
    add_deletions(31)
    run_sweep(SMALL, 1)
    break_repositories(tmp_path, {})

    result = run_sweep(SMALL, 1)

    assert (result.outcome, result.reason, list(Rejection.select())) == ("partial", "limit", [])


@pytest.mark.parametrize("cause", ["no_root", "no_git", "no_database"])
def test_failure_that_concerns_every_project_defers_none(
    root: Path, add_deletions: AddDeletions, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    # Otherwise a long outage would delay the work by up to an hour after its end.
    made(root, 1, "refs/heads/1")
    add_deletions(1)
    if cause == "no_root":
        (root / "@hashed").rename(root / "unmounted")
    elif cause == "no_git":
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        monkeypatch.setattr(PendingDeletions, "prepare", lambda self, batch: database.execute_sql("SELECT 1 FROM none"))

    result = run_sweep(project_cleanup, 1)

    assert (result.outcome, result.is_deferred, list(Rejection.select())) == ("failed", False, [])


def test_alert_names_broken_and_rejected_projects_until_their_repair(
    project_refs: Callable[[], None],
    repository: MakeRepository,
    add_refs: AddRefs,
    tmp_path: Path,
    export_to: Callable[[Exporter], None],
    lines: Lines,
) -> None:
    registry = CollectorRegistry()
    export_to(Exporter({"registry": registry}))
    break_repositories(tmp_path, {4: "not_writable", 5: "disk_error"})
    lock = lock_ref_of(repository, add_refs, 6)

    for _ in range(3):
        project_refs()
        for project_id in (4, 5, 6, 1):
            run_sweep(project_cleanup, project_id)
    (alert,) = alerts()
    first = Rejection.select(fn.MIN(Rejection.since)).scalar()
    labels = {"worker": project_cleanup.name, "alarm": "failed_runs"}
    before = registry.get_sample_value("housekeeping_alarm", labels)
    break_repositories(tmp_path, {})
    lock.unlink()
    for project_id in (4, 5, 6):
        run_sweep(project_cleanup, project_id)

    assert alert.text.startswith(f"project id 4 (3 runs in a row since {first:%Y-%m-%d %H:%M} UTC: RefDeletionFailed: ")
    assert all(f", {project_id} (3 runs in a row since " in alert.text for project_id in (5, 6))
    assert (alert.name, alert.value, alert.since) == ("failed_runs", 3, first)
    assert before == 1, "the run of project 1, which succeeded, does not clear it"
    assert {line.alarm for line in lines("Alert")} >= {"failed_runs"}
    assert ([each.name for each in alerts()], registry.get_sample_value("housekeeping_alarm", labels)) == ([], 0)


def alerts() -> Sequence[Alert]:
    return worker_status(project_cleanup, datetime.now(UTC), UTC).alarms
