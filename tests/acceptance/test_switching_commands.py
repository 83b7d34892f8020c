"""The commands ``pause``, ``resume``, ``narrow`` and ``why``."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from housekeeping import Settings
from tests.acceptance.conftest import Command
from tests.internals.ledger import Run
from tests.internals.middleware import TickStore

#: Starts many processes.
pytestmark = pytest.mark.slow

WORKER = "user_status_cleanup.batch"
AT = datetime(2026, 11, 20, 3, tzinfo=UTC)


def test_paused_worker_skips_runs_until_it_is_resumed(add: Callable[[int], None], command: Command) -> None:
    add(3)

    paused = command("pause", WORKER, "--reason", "migration", "--until", "2h")
    skipped = json.loads(command("run", WORKER, "--json").stdout)
    status = command("status")
    resumed = command("resume", WORKER)
    done = json.loads(command("run", WORKER, "--json").stdout)

    assert paused.stdout.startswith(f"{WORKER} is paused until ") and paused.stdout.endswith(" UTC: migration\n")
    assert (skipped["outcome"], skipped["reason"]) == ("skipped", "paused")
    assert f"{WORKER} is paused until" in status.stdout and ": migration (" in status.stdout
    assert resumed.stdout == f"{WORKER} resumes at its next tick\n"
    assert (done["outcome"], done["counts"]["deleted_rows"]) == ("done", 3)


def test_changes_of_overrides_are_printed_as_json(made: None, command: Command) -> None:
    def change(*words: str) -> dict[str, Any]:
        [changed] = json.loads(command(*words, "--json").stdout)["workers"]
        assert changed["worker"] == WORKER
        return dict(changed)

    paused = change("pause", WORKER, "--reason", "migration")["override"]
    narrowed = change("narrow", WORKER, "--batch-size", "10")["override"]
    resumed, again = change("resume", WORKER), change("resume", WORKER)

    assert (paused["state"], paused["reason"]) == ("paused", "migration")
    assert (narrowed["state"], narrowed["batch_size"]) == ("narrow", 10)
    assert [(each["changed"], each["override"]) for each in (resumed, again)] == [(True, None), (False, None)]


def test_all_workers_are_paused_and_resumed_together(made: None, command: Command) -> None:
    workers = json.loads(command("status", "--json").stdout)["workers"]
    names = [each["worker"] for each in workers]

    command("pause", WORKER, "--reason", "moves")
    paused = command("pause", "--all").stdout.splitlines()
    resumed = command("resume", "--all").stdout.splitlines()

    kept = f"kept: {WORKER} is paused until it is resumed: moves"
    assert paused == [kept if name == WORKER else f"{name} is paused until it is resumed" for name in names]
    assert resumed == [f"{name} resumes at its next tick" for name in names]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pause"], "name one worker, or give --all"),
        (["pause", WORKER, "--all"], "name one worker, or give --all"),
        (["pause", "user_status_cleanup.bach"], f"did you mean {WORKER}?"),
        (["pause", WORKER, "--until", "yesterday"], "'yesterday' is not a time; it should be such as 2h"),
        (["narrow", WORKER], "nothing to narrow; give --batch-size, --max-runtime or --rows-per-s"),
        (["why", WORKER, "noon"], "'noon' is not a time; it should be such as 2026-11-20T03:00 or 03:00"),
        (["why", "nope"], "there is no worker 'nope'"),
    ],
)
def test_wrong_override_option_is_one_error_line(made: None, command: Command, arguments: list[str], said: str) -> None:
    refused = command(*arguments)

    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert said in refused.stderr


def test_narrowed_limits_are_shown(made: None, command: Command) -> None:
    command("narrow", WORKER, "--batch-size", "10", "--max-runtime", "5", "--rows-per-s", "2.5", "--reason", "peak")

    status = json.loads(command("status", "--json").stdout)

    switch = next(each["override"] for each in status["workers"] if each["worker"] == WORKER)
    assert (switch["state"], switch["batch_size"], switch["max_runtime_s"]) == ("narrow", 10, 5.0)
    assert switch["rows_per_s"] == 2.5
    assert (switch["reason"], switch["until"]) == ("peak", None) and "@" in switch["user"]


def test_why_explains_the_latest_tick_in_text_and_json(made: None, command: Command) -> None:
    Run.create(
        worker="housekeeping.old_runs",
        tick=AT,
        trigger="schedule",
        outcome="skipped",
        reason="paused",
        started_at=AT,
        heartbeat_at=AT,
        finished_at=AT,
    )

    said = command("why", "housekeeping.old_runs", "2026-11-20T03:00")
    facts = json.loads(command("why", "housekeeping.old_runs", "2026-11-20T03:00", "--json").stdout)

    assert said.stdout.splitlines()[:2] == [
        "housekeeping.old_runs, tick 2026-11-20 03:00 UTC: skipped",
        "the worker is paused: housekeeping resume housekeeping.old_runs",
    ]
    assert (facts["outcome"], facts["attempts"][0]["reason"]) == ("skipped", "paused")


def test_missed_tick_whose_row_is_not_written_yet_was_not_sent(
    made: None, command: Command, settings: Settings, redis_client: redis.Redis
) -> None:
    tick = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=5)
    store = TickStore(redis_client, settings.namespace)
    store.remember(WORKER, tick - timedelta(minutes=1))
    store.record(WORKER, tick, "t", "missed", last_missed=tick, noting=True)

    assert ": not_sent" in command("why", WORKER, tick.isoformat()).stdout


def test_time_of_why_is_in_the_configured_zone(made: None, command: Command) -> None:
    nightly = {"TIMEZONE": "Europe/Berlin", "WORKERS": f'{{"{WORKER}": {{"schedule": "0 2 * * *"}}}}'}

    plain, skipped = (command("why", WORKER, f"{day}T02:00", **nightly).stdout for day in ("2025-06-01", "2025-03-30"))

    assert plain.startswith(f"{WORKER}, tick 2025-06-01 02:00 Europe/Berlin (00:00 UTC): unknown\n")
    assert skipped.splitlines()[0] == f"{WORKER}, tick 2025-03-30 03:00 Europe/Berlin (01:00 UTC): unknown"
    assert skipped.splitlines()[1].startswith("Europe/Berlin skipped 02:00 on 2025-03-30: ")


def test_why_of_a_paused_worker_names_who_why_and_until_when(made: None, command: Command) -> None:
    command("pause", WORKER, "--reason", "a migration", "--until", "2h")

    shown = command("why", WORKER).stdout

    assert "a run now would be skipped (paused)" in shown
    assert f"{WORKER} is paused until " in shown and " UTC: a migration (set by " in shown


def test_acknowledged_alert_names_its_user_in_status(made: None, command: Command) -> None:
    at = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), AT)
    Run.create(worker=WORKER, trigger="schedule", outcome="failed", reason="gone", **at)

    done = command("acknowledge", "last_run", WORKER)
    status = command("status")
    wrong = command("acknowledge", "backlog")
    logged = json.loads(command("actions", "--json").stdout)["actions"]

    assert done.stdout == f"last_run acknowledged for {WORKER}\n"
    [line] = [line for line in status.stdout.splitlines() if "(last_run" in line]
    assert ", acknowledged by " in line
    assert wrong.returncode == 2 and "no alert 'backlog' is active; active alerts: last_run" in wrong.stderr
    assert [(each["action"], each["target"]) for each in logged] == [("acknowledge", "last_run")]


def test_run_is_stopped_once_and_an_ended_one_is_not(made: None, command: Command) -> None:
    now = datetime.now(UTC)
    run = Run.create(worker=WORKER, trigger="schedule", started_at=now, heartbeat_at=now)

    first, again = (command("stop", str(run.id)) for _ in range(2))
    stopped_by = Run.get_by_id(run.id).stopped_by
    Run.update(outcome="partial", reason="stopped", finished_at=now).where(Run.id == run.id).execute()
    ended = json.loads(command("stop", str(run.id), "--json").stdout)
    shown = command("runs", str(run.id))
    actions = json.loads(command("actions", "--target", str(run.id), "--json").stdout)["actions"]

    assert first.stdout == f"run {run.id} of {WORKER} ends after its current batch\n"
    assert again.stdout == f"run {run.id} is already ending after its current batch, asked by {stopped_by}\n"
    assert (ended["run_id"], ended["worker"]) == (run.id, WORKER)
    assert (ended["changed"], "has already ended as partial" in ended["result"]) == (False, True)
    assert f"result: {stopped_by} stopped it after its batch" in shown.stdout
    assert [(each["action"], each["user"]) for each in actions] == [("stop", stopped_by)] * 3


@pytest.mark.parametrize(
    ("run", "said"), [("x", "'x' is no ID of a run"), ("99", "there is no run 99"), ("gone:1", "no database 'gone'")]
)
def test_stop_of_no_run_is_one_error_line(made: None, command: Command, run: str, said: str) -> None:
    refused = command("stop", run)

    assert (refused.returncode, refused.stdout) == (2, "") and said in refused.stderr
