"""Projects whose refs were all rejected, or whose repository is broken: scheduled again after a growing delay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePath
from typing import Any

import pytest
from dramatiq.brokers.redis import RedisBroker
from peewee import SQL, fn
from prometheus_client import CollectorRegistry
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.integration.middleware.applications import eventually, queued, working
from tests.integration.workers.batched_git_ref_updates.cleaned import NONE, SMALL
from tests.integration.workers.batched_git_ref_updates.conftest import AddDeletions, AddRefs, Explained, Lines, Pending
from tests.integration.workers.batched_git_ref_updates.repositories import MakeRepository, made
from tests.integration.workers.batched_git_ref_updates.scheduled import drain, enqueued, sized
from tests.integration.workers.batched_git_ref_updates.test_statement_costs import INDEX
from tests.internals.core import Exporter
from tests.internals.database import database
from tests.internals.engine import rejection_store, run_sweep
from tests.internals.insight import Alert, dry_run, worker_status
from tests.internals.ledger import NOW, Rejection, Run
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


def locked(repository: MakeRepository, project_id: int = 1, ref: str = "refs/heads/a") -> None:
    """Project whose only ref stays locked."""
    repository(ref, project_id=project_id).lock(ref)


def let_time_pass() -> None:
    Rejection.update(not_before=NOW - timedelta(seconds=1)).where(Rejection.not_before.is_null(False)).execute()


def let_a_minute_pass() -> None:
    """Move what is remembered a minute into the past."""
    minute = SQL("interval '1 minute'")
    Rejection.update(not_before=Rejection.not_before - minute).execute()
    for cause in rejection_store.reported_at:
        rejection_store.reported_at[cause] -= 60


def test_rejected_project_is_left_out_until_its_delay_has_passed(
    broker: RedisBroker, settings: Settings, repository: MakeRepository, add_refs: AddRefs
) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    add_refs("refs/heads/b", project_id=2)
    run_sweep(project_cleanup, 1)

    first = run_sweep(cleanup_scheduler)
    left_out = drain(broker, settings)
    let_time_pass()
    run_sweep(cleanup_scheduler)

    assert first.counts == ONE, "of those left out none is counted"
    assert (left_out, enqueued(broker)) == ([2], [1, 2])


def test_delay_doubles_with_each_run_that_rejects_everything(repository: MakeRepository, add_refs: AddRefs) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    delays = []

    for _ in range(8):
        run_sweep(project_cleanup, 1)
        row = Rejection.get()
        delays.append(round((row.not_before - row.last_at).total_seconds() / 60))

    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]


def test_rejected_project_with_a_new_row_is_scheduled_at_once(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    add_refs("refs/heads/new")

    assert run_sweep(cleanup_scheduler).counts == ONE
    assert enqueued(broker) == [1]


def test_new_row_of_another_project_schedules_no_rejected_one(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    locked(repository, project_id=2)
    add_refs("refs/heads/a", project_id=2)
    run_sweep(project_cleanup, 2)
    add_refs("refs/heads/new", project_id=1)

    run_sweep(cleanup_scheduler)

    assert enqueued(broker) == [1]


def test_project_with_a_processed_row_is_not_deferred(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    locked(repository)
    add_refs("refs/heads/a", "refs/heads/b")

    run_sweep(project_cleanup, 1)
    run_sweep(cleanup_scheduler)

    assert (Rejection.get().times, Rejection.get().not_before) == (0, None)
    assert enqueued(broker) == [1]


def test_deferred_project_runs_when_it_is_run_by_hand(
    repository: MakeRepository, add_refs: AddRefs, pending: Pending
) -> None:
    bare = repository("refs/heads/a")
    lock = bare.lock("refs/heads/a")
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    lock.unlink()

    assert run_sweep(project_cleanup, 1).counts["total_deletes"] == 1
    assert (pending(), list(Rejection.select())) == ([], [])


def test_deferred_projects_do_not_use_up_a_run_s_limit(
    broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs
) -> None:
    for project_id in range(1, 6):
        locked(repository, project_id)
        add_refs("refs/heads/a", project_id=project_id)
        run_sweep(project_cleanup, project_id)
    add_refs("refs/heads/a", project_id=6)

    result = run_sweep(sized(max_projects=2, batch_size=2))

    assert (result.outcome, result.counts) == ("done", ONE)
    assert enqueued(broker) == [6]


def test_plan_leaves_deferred_projects_out(broker: RedisBroker, repository: MakeRepository, add_refs: AddRefs) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    add_refs("refs/heads/b", project_id=2)

    planned = dry_run(cleanup_scheduler)

    assert planned.counts["total_projects"] == 1
    assert run_sweep(cleanup_scheduler).counts["total_projects"] == 1


def test_no_query_for_delays_without_deferred_projects(
    broker: RedisBroker, add_deletions: AddDeletions, statements: list[str]
) -> None:
    add_deletions(300, project="n")

    run_sweep(cleanup_scheduler)

    assert len([sql for sql in statements if '"rejections"' in sql and "not_before" in sql]) == 1, "once a run"


def test_deferred_projects_cost_one_statement_per_thousand(
    broker: RedisBroker,
    repository: MakeRepository,
    add_refs: AddRefs,
    add_deletions: AddDeletions,
    statements: list[str],
) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    add_deletions(1999, project="n + 1")
    statements.clear()

    assert run_sweep(cleanup_scheduler).counts["total_projects"] == 1999
    assert len([sql for sql in statements if '"rejections"' in sql and "not_before" in sql]) == 2


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


@pytest.mark.usefixtures("root")
def test_project_without_rejections_is_no_longer_deferred(
    repository: MakeRepository, add_refs: AddRefs, deletions: object
) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    run_sweep(project_cleanup, 1)
    repository(project_id=2)
    run_sweep(project_cleanup, 2)

    assert [row.subject for row in Rejection.select()] == ["1"], "another project's run says nothing of it"


#: What breaks a repository: a shell command, run before git with the repository as `$GIT_DIR`.
BROKEN = {
    "not_writable": "echo \"fatal: cannot lock ref 'refs/heads/1': Unable to create '$GIT_DIR/refs/heads/1.lock': "
    'Permission denied" >&2; exit 128',
    "corrupt": 'echo nonsense > "$GIT_DIR/packed-refs"',
    "no_repository": 'rm -f "$GIT_DIR/HEAD"',
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


def failed_runs() -> int:
    return Run.select().where((Run.worker == project_cleanup.name) & (Run.outcome == "failed")).count()


@pytest.fixture
def project_refs(repository: MakeRepository, add_refs: AddRefs) -> Callable[[], None]:
    """Add a row to each of five projects."""
    for project_id in range(1, 6):
        repository("refs/heads/1", project_id=project_id)

    def add() -> None:
        for project_id in range(1, 6):
            add_refs("refs/heads/1", project_id=project_id)

    return add


@pytest.fixture
def failed_runs_metric(export_to: Callable[[Exporter], None]) -> Callable[[], float | None]:
    """Return the exported alert `failed_runs` of the cleanup: 1 while active."""
    registry = CollectorRegistry()
    export_to(Exporter({"registry": registry}))
    labels = {"worker": project_cleanup.name, "alarm": "failed_runs"}
    return lambda: registry.get_sample_value("housekeeping_alarm", labels)


@pytest.mark.slow
@pytest.mark.parametrize("causes", [("not_writable", "corrupt"), ("no_repository", "disk_error")])
def test_broken_repositories_fail_six_runs_an_hour_each(
    broker: RedisBroker,
    project_refs: Callable[[], None],
    tmp_path: Path,
    reported: list[dict[str, Any]],
    pending: Pending,
    causes: tuple[str, str],
) -> None:
    # Each project has a new row in each minute, so that the scheduler would send it.
    break_repositories(tmp_path, {4: causes[0], 5: causes[1]})

    with working(broker):
        for _ in range(60):
            project_refs()
            run_sweep(cleanup_scheduler)
            eventually(lambda: not queued(broker, "git_refs"))
            let_a_minute_pass()

    assert failed_runs() == 2 * len([1, 2, 4, 8, 16, 32])
    assert len({each["cause"] for each in reported}) == len(reported) == 2, "a report an hour for each cause"
    assert (queued(broker, "git_refs.DQ"), queued(broker, "git_refs.XQ")) == ([], []), "nothing is retried beside it"
    assert len(pending()) == 2 * 60, "other projects are cleaned meanwhile"


def test_broken_repository_defers_its_project_although_it_has_new_rows(
    broker: RedisBroker, settings: Settings, project_refs: Callable[[], None], tmp_path: Path
) -> None:
    break_repositories(tmp_path, {4: "corrupt"})
    project_refs()
    for project_id in range(1, 6):
        run_sweep(project_cleanup, project_id)

    project_refs()
    run_sweep(cleanup_scheduler)
    at_once = drain(broker, settings)
    let_time_pass()
    run_sweep(cleanup_scheduler)

    assert (at_once, enqueued(broker)) == ([1, 2, 3, 5], [1, 2, 3, 4, 5])


def test_plan_leaves_projects_with_broken_repositories_out(
    broker: RedisBroker, project_refs: Callable[[], None], tmp_path: Path
) -> None:
    break_repositories(tmp_path, {4: "corrupt"})
    project_refs()
    run_sweep(project_cleanup, 4)
    project_refs()

    assert dry_run(cleanup_scheduler).counts["total_projects"] == 4
    assert run_sweep(cleanup_scheduler).counts["total_projects"] == 4


def test_repaired_repository_is_no_longer_deferred(
    project_refs: Callable[[], None], tmp_path: Path, pending: Pending
) -> None:
    break_repositories(tmp_path, {1: "not_writable"})
    project_refs()
    run_sweep(project_cleanup, 1)
    assert (Rejection.get().times, Rejection.get().rows) == (1, 0)
    break_repositories(tmp_path, {})

    assert run_sweep(project_cleanup, 1).counts["total_deletes"] == 1
    assert (list(Rejection.select()), len(pending())) == ([], 4)


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


def test_alert_names_broken_projects_while_others_succeed(
    project_refs: Callable[[], None],
    tmp_path: Path,
    failed_runs_metric: Callable[[], float | None],
    lines: Lines,
) -> None:
    break_repositories(tmp_path, {4: "not_writable", 5: "corrupt"})

    for _ in range(3):
        project_refs()
        for project_id in (4, 5, 1):
            run_sweep(project_cleanup, project_id)

    (alert,) = [each for each in alerts() if each.name == "failed_runs"]
    first = Rejection.select(fn.MIN(Rejection.since)).scalar()
    assert alert.text.startswith(f"project id 4 (3 runs in a row since {first:%Y-%m-%d %H:%M} UTC: RefDeletionFailed: ")
    assert ", 5 (3 runs in a row since " in alert.text
    assert (alert.value, alert.since) == (3, first)
    assert failed_runs_metric() == 1, "the run of project 1, which succeeded, does not clear it"
    assert [line.alarm for line in lines("Alert")] == ["failed_runs"] * 2


def test_alert_of_a_broken_project_ends_with_its_repair(
    project_refs: Callable[[], None], tmp_path: Path, failed_runs_metric: Callable[[], float | None]
) -> None:
    break_repositories(tmp_path, {4: "not_writable"})
    project_refs()
    for _ in range(3):
        run_sweep(project_cleanup, 4)
    break_repositories(tmp_path, {})
    run_sweep(project_cleanup, 4)

    assert [each.name for each in alerts()] == []
    assert failed_runs_metric() == 0


def test_alert_names_projects_of_which_every_row_is_rejected(repository: MakeRepository, add_refs: AddRefs) -> None:
    locked(repository)
    add_refs("refs/heads/a")
    repository(project_id=2)
    for project_id in (1, 1, 1, 2):
        run_sweep(project_cleanup, project_id)

    (alert,) = alerts()

    assert alert.text.startswith("project id 1 (3 runs in a row since ")


def alerts() -> Sequence[Alert]:
    return worker_status(project_cleanup, datetime.now(UTC), UTC).alarms
