"""Sweeps of an application, loaded by the library's processes from the current folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.processes import eventually, started
from tests.acceptance.session_sweeps import NAME as SWEEP
from tests.acceptance.session_sweeps import sessions_module
from tests.internals.database import Database
from tests.internals.ledger import Run

#: Starts many processes.
pytestmark = pytest.mark.slow

PROGRAM: Final = str(Path(sys.executable).with_name("housekeeping"))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Create an application's folder."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/sweeps.py").write_text(sessions_module())
    return tmp_path


def test_missing_module_ends_a_dramatiq_worker_with_one_line(environment: dict[str, str], shop: Path) -> None:
    command = [sys.executable, "-m", "dramatiq", "housekeeping.app", "-p", "1", "-t", "1"]

    finished = subprocess.run(
        command,
        env={**environment, "HOUSEKEEPING_SWEEPS": "shop.nowhere"},
        cwd=shop,
        capture_output=True,
        text=True,
        timeout=60,
    )

    said = [line for line in finished.stderr.splitlines() if line.startswith("housekeeping: ")]
    assert finished.returncode != 0
    assert len(said) == 1 and "names 'shop.nowhere', which is not found" in said[0]
    assert "Traceback" not in finished.stderr


def test_init_creates_the_tables_of_an_applications_sweeps(
    environment: dict[str, str], postgres: Database, shop: Path
) -> None:
    made = subprocess.run(
        [PROGRAM, "init", "--with-tables"],
        env={**environment, "HOUSEKEEPING_SWEEPS": "shop.sweeps"},
        cwd=shop,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert made.stdout.splitlines()[-1] == "table user_session: created"
    assert postgres.table_exists("user_session")


def test_worker_runs_messages_of_an_application(
    environment: dict[str, str], postgres: Database, shop: Path, tmp_path: Path
) -> None:
    postgres.execute_sql("CREATE TABLE user_session (token text PRIMARY KEY, expires_at timestamptz)")
    postgres.execute_sql("INSERT INTO user_session SELECT n, now() FROM generate_series(1, 3) AS n")
    environment["HOUSEKEEPING_SWEEPS"] = "shop.sweeps"
    in_folder = ["sh", "-c", 'cd "$0" && exec "$@"', str(shop)]
    send = f'from housekeeping.app import actors; actors["{SWEEP}"].send()'

    subprocess.run([*in_folder, sys.executable, "-c", send], env=environment, check=True, timeout=60)
    with started([*in_folder, PROGRAM, "worker", "-t", "1"], environment, tmp_path / "log") as worker:
        eventually(lambda: Run.select().where(Run.outcome.is_null(False)).exists(), worker)
        assert worker.terminate() == 0

    [run] = Run.select()
    assert (run.worker, run.outcome, run.counts["deleted_rows"], run.trigger) == (SWEEP, "done", 3, "enqueue")


def test_first_run_of_a_new_sweep_waits_for_the_confirmation_of_its_plan(
    environment: dict[str, str], shop: Path, postgres: Database
) -> None:
    postgres.execute_sql("CREATE TABLE user_session (token text PRIMARY KEY, expires_at timestamptz NOT NULL)")
    postgres.execute_sql(
        "INSERT INTO user_session SELECT n::text, now() - interval '1 day' FROM generate_series(1, 1000) AS n"
    )

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        given = {**environment, "HOUSEKEEPING_SWEEPS": "shop.sweeps"}
        return subprocess.run([PROGRAM, *arguments], env=given, cwd=shop, capture_output=True, text=True, timeout=60)

    planned = json.loads(command("plan", SWEEP, "--json").stdout)
    shown = command("plan", SWEEP).stdout
    skipped = command("run", SWEEP, "--force")
    confirmed = json.loads(command("run", SWEEP, "--confirm", "--json").stdout)
    postgres.execute_sql("INSERT INTO user_session SELECT 'later ' || n, now() FROM generate_series(1, 2000) AS n")
    follows = json.loads(command("run", SWEEP, "--json").stdout)

    to_type = f"Look: housekeeping plan {SWEEP}; then: housekeeping run {SWEEP} --confirm"
    assert f"first run  skips  {planned['unconfirmed']}" in shown
    text = planned["unconfirmed"].replace("If these rows should go", f"Look: housekeeping plan {SWEEP}; then")
    assert f"housekeeping plan {SWEEP}" not in shown and text.endswith(to_type)
    assert (skipped.returncode, "skipped: unconfirmed" in skipped.stdout) == (0, True)
    assert f"housekeeping: {text}" in skipped.stderr
    assert (confirmed["outcome"], confirmed["counts"]["deleted_rows"]) == ("done", 1000)
    assert (follows["outcome"], follows["counts"]["deleted_rows"]) == ("done", 2000)
