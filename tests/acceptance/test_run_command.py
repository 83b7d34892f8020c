"""The command ``housekeeping run``."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Command
from tests.acceptance.processes import read_terminal

WORKER = "user_status_cleanup.batch"


def _logged(finished: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in finished.stderr.splitlines()]


def test_stdout_has_only_the_result_object_and_logs_are_on_stderr(command: Command, add: Callable[[int], None]) -> None:
    add(101)

    finished = command("run", WORKER, "--json")

    result = json.loads(finished.stdout)
    assert finished.returncode == 0
    assert list(result) == ["worker", "outcome", "reason", "run_id", "started_at", "duration_s", "counts", "dry_run"]
    assert (result["worker"], result["outcome"], result["reason"]) == (WORKER, "done", None)
    assert (type(result["run_id"]), result["duration_s"] > 0, result["dry_run"]) == (int, True, False)
    assert datetime.fromisoformat(result["started_at"]).utcoffset() is not None
    assert list(result["counts"].items()) == [("deleted_rows", 101), ("batches", 2), ("out_of_time", False)]
    started, *_, ended = _logged(finished)
    assert (started["event"], ended["event"]) == ("Run started", "Run ended")
    assert {started["run_id"], ended["run_id"]} == {result["run_id"]}
    assert ended.items() >= {"level": "info", "worker": WORKER, "deleted_rows": 101, "outcome": "done"}.items()


def test_dry_run_prints_the_same_object_and_changes_nothing(command: Command, add: Callable[[int], None]) -> None:
    add(101)

    dry = json.loads(command("run", WORKER, "--json", "--dry-run").stdout)
    real = json.loads(command("run", WORKER, "--json").stdout)

    assert (dry["dry_run"], dry["run_id"], dry["counts"]) == (True, None, real["counts"])


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_run_without_a_server_is_a_failed_result(command: Command, options: list[str]) -> None:
    finished = command("run", WORKER, "--json", *options, DATABASE_URL="postgresql://me:hunter2@localhost:1/db")

    result = json.loads(finished.stdout)
    assert (finished.returncode, result["outcome"], result["run_id"]) == (1, "failed", None)
    assert "Connection refused" in result["reason"]
    assert finished.stderr.splitlines()[-1].startswith(f"housekeeping: {WORKER} failed: ")
    assert "hunter2" not in finished.stdout + finished.stderr and "Traceback" not in finished.stderr


@pytest.mark.parametrize(("prepared", "way_out"), [(False, "run: housekeeping init"), (True, "init --with-tables")])
def test_run_without_its_ledger_fails_and_names_the_remedy(command: Command, prepared: bool, way_out: str) -> None:
    if prepared:
        command("init")

    finished = command("run", WORKER, "--json", BUILT_IN="user_status_cleanup")

    assert (finished.returncode, json.loads(finished.stdout)["outcome"]) == (2, "failed")
    assert finished.stderr.splitlines()[-1].endswith(way_out)


def test_run_without_its_table_is_skipped_and_names_it(command: Command) -> None:
    command("init")

    finished = command("run", WORKER, "--json")

    result = json.loads(finished.stdout)
    assert (finished.returncode, result["outcome"], result["reason"]) == (0, "skipped", "not_set_up")
    assert "table user_statuses is not in this database" in finished.stderr


def test_disabled_worker_is_skipped_unless_forced(command: Command, made: None) -> None:
    off = f'{{"{WORKER}": {{"enabled": false}}}}'

    skipped, forced = (command("run", WORKER, "--json", *force, WORKERS=off) for force in ([], ["--force"]))

    assert [json.loads(each.stdout)["outcome"] for each in (skipped, forced)] == ["skipped", "done"]
    assert (skipped.returncode, json.loads(skipped.stdout)["reason"]) == (0, "disabled")


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_beside_the_result(
    environment: dict[str, str], tmp_path: Path, add: Callable[[int], None]
) -> None:
    add(5_000)

    said, shown = _on_a_terminal(environment, tmp_path)

    assert json.loads(said)["counts"]["deleted_rows"] == 5_000
    assert f"{WORKER}: counting" in shown
    assert " of 5,000 rows (" in shown and " rows/s, " in shown and " left" in shown
    assert "Run ended" in shown


def _on_a_terminal(environment: dict[str, str], folder: Path) -> tuple[bytes, str]:
    """Return a run's stdout, and its output on the terminal."""
    controller, child_terminal = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "housekeeping", "run", WORKER, "--json"],
        env=environment | {"TERM": "xterm", "COLUMNS": "120", "LC_ALL": "C", "HOUSEKEEPING_LOG_FORMAT": "console"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=child_terminal,
    )
    os.close(child_terminal)
    shown = b"".join(iter(lambda: read_terminal(controller), b"")).decode()
    said, _ = running.communicate(timeout=30)
    return said, shown
