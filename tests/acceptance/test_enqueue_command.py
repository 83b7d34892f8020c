"""The command ``housekeeping enqueue``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.conftest import Command
from tests.acceptance.processes import WORKER as DRAMATIQ
from tests.acceptance.processes import eventually, started
from tests.internals.ledger import Run

pytestmark = pytest.mark.slow

WORKER: Final = "user_status_cleanup.batch"
CLEANUP: Final = "batched_git_ref_updates.project_cleanup"


def test_second_message_for_the_same_work_is_dropped_and_names_the_first(command: Command, made: None) -> None:
    first = json.loads(command("enqueue", WORKER, "--json").stdout)
    second = json.loads(command("enqueue", WORKER, "--json").stdout)
    in_words = command("enqueue", WORKER)

    assert (first["enqueued"], first["duplicate_of"], first["warning"]) == (True, None, None)
    assert (second["enqueued"], second["duplicate_of"]) == (False, first["message_id"])
    assert in_words.returncode == 0
    assert in_words.stdout == (
        f"dropped as a duplicate: message {first['message_id']} does the same work and has not ended\n"
    )


def test_worker_process_runs_enqueued_messages(
    command: Command, made: None, environment: dict[str, str], tmp_path: Path
) -> None:
    sent = json.loads(command("enqueue", WORKER, "--json").stdout)

    with started([*DRAMATIQ, "housekeeping.app", "-p", "1", "-t", "1"], environment, tmp_path / "log") as process:
        eventually(lambda: Run.select().where(Run.outcome == "done").exists(), process)
        assert process.terminate() == 0

    [run] = Run.select()
    assert (run.trigger, run.message_id) == ("enqueue", sent["message_id"])
    explained = command("runs", str(run.id)).stdout
    assert "started: it was enqueued, by the application or by housekeeping enqueue" in explained


def test_paused_worker_is_enqueued_with_a_warning(command: Command, made: None) -> None:
    command("pause", WORKER, "--reason", "migration")

    sent = command("enqueue", WORKER)

    assert sent.returncode == 0 and sent.stdout.startswith("enqueued: message ")
    assert sent.stderr.splitlines()[-1] == (
        f"housekeeping: warning: {WORKER} is paused until it is resumed: migration: its run will be skipped "
        f"(housekeeping resume {WORKER})"
    )


def test_disabled_worker_is_enqueued_with_a_warning(command: Command, made: None) -> None:
    sent = json.loads(command("enqueue", WORKER, "--json", WORKERS=f'{{"{WORKER}": {{"enabled": false}}}}').stdout)

    assert sent["enqueued"] and "is disabled in HOUSEKEEPING_WORKERS" in sent["warning"]


@pytest.mark.parametrize(
    ("arguments", "settings_of_it", "status", "said"),
    [
        (["user_status_cleanup.bach"], {}, 2, f"did you mean {WORKER}?"),
        ([CLEANUP], {}, 2, f"{CLEANUP} takes an argument"),
        ([WORKER, "7"], {}, 2, f"{WORKER} takes no argument"),
        ([WORKER], {"REDIS_URL": "redis://127.0.0.1:1"}, 1, "housekeeping: Redis did not answer"),
    ],
)
def test_enqueue_error_is_one_line(
    command: Command,
    made: None,
    arguments: list[str],
    settings_of_it: dict[str, str],
    status: int,
    said: str,
) -> None:
    refused = command("enqueue", *arguments, **settings_of_it)

    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (status, "", 1), refused.stderr
    assert said in refused.stderr
