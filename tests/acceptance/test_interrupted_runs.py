"""Ctrl-C and SIGTERM end a foreground run, whatever it waits for."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.acceptance.conftest import Command
from tests.acceptance.processes import eventually, wait_for_line
from tests.internals.database import Database
from tests.internals.ledger import Run

pytestmark = pytest.mark.slow

WORKER: Final = "user_status_cleanup.batch"
PARCELS: Final = "shop.parcels"
SIGNALS: Final = [signal.SIGINT, signal.SIGTERM]

#: Writes two batches, and calls the tested function for the fifth row.
MODULE: Final = """
import os, pathlib, signal, time
from peewee import IntegerField
from housekeeping import BaseModel, Call, Delete, Limits, Rows, Sweep

class Parcel(BaseModel):
    id = IntegerField(primary_key=True)

def sleep():
    time.sleep(3600)

def ask_object_store():
    import obstore
    store = obstore.store.S3Store(
        "bucket",
        config={"endpoint": os.environ["ENDPOINT"], "access_key_id": "a", "secret_access_key": "b", "region": "c"},
        client_options={"allow_http": "true", "timeout": "1h"},
    )
    obstore.delete(store, ["a"])

def interrupt_the_process():
    os.kill(os.getpid(), signal.SIGINT)

def send(parcel):
    if parcel.id == 5:
        pathlib.Path("called").touch()
        globals()[os.environ["WAITS_BY"]]()

parcels = Sweep(
    "shop.parcels",
    Rows(Parcel, stale=lambda row: row.id > 0, action=Call(send, then=Delete())),
    limits=Limits(batch=2, batch_takes=None),
)
"""

Started = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def running(environment: dict[str, str], tmp_path: Path) -> Iterator[Started]:
    """Starts ``housekeeping run NAME --json``, which is killed with the test."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "housekeeping", "run", *arguments, "--json"],
            env={**environment, **variables},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def parcels(postgres: Database, tmp_path: Path, environment: dict[str, str]) -> None:
    postgres.execute_sql("CREATE TABLE parcel (id integer PRIMARY KEY)")
    postgres.execute_sql("INSERT INTO parcel SELECT generate_series(1, 9)")
    (tmp_path / "shop.py").write_text(MODULE)
    environment["HOUSEKEEPING_SWEEPS"] = "shop"


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def ended(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Return the result object and the last stderr line of a process that received a signal."""
    said, logged = process.communicate(timeout=30)
    assert "Traceback" not in logged
    return json.loads(said), logged.splitlines()[-1]


def assert_closed(**counts: int) -> None:
    [run] = Run.select()
    assert (run.outcome, run.reason, run.error) == ("partial", "shutdown", None)
    assert counts.items() <= run.counts.items()


def waiting_for_lock(admin: Connection) -> bool:
    with admin.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 4712 AND NOT granted")
        return cursor.fetchone() is not None


@pytest.mark.parametrize("number", SIGNALS)
def test_run_ends_after_the_batch_of_a_long_statement(
    running: Started,
    command: Command,
    add: Callable[[int], None],
    admin: Connection,
    settings: Settings,
    number: signal.Signals,
) -> None:
    add(300)
    with admin.cursor() as cursor:
        # The second batch waits for a lock.
        cursor.execute(
            f"CREATE FUNCTION {settings.namespace}.wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF (SELECT count(*) FROM {settings.namespace}.user_statuses) < 300 THEN "
            "PERFORM pg_advisory_xact_lock(4712); END IF; RETURN NULL; END $$"
        )
        cursor.execute(
            f"CREATE TRIGGER wait BEFORE DELETE ON {settings.namespace}.user_statuses "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {settings.namespace}.wait()"
        )
        cursor.execute("SELECT pg_advisory_lock(4712)")
    process = running(WORKER)
    eventually(lambda: waiting_for_lock(admin))

    process.send_signal(number)
    wait_for_line(process, "the run ends after its batch")
    with admin.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_unlock(4712)")
    result, line = ended(process)

    assert (process.returncode, result["outcome"], result["reason"]) == (0, "partial", "shutdown")
    assert line == (
        f"housekeeping: {WORKER} was interrupted; committed: deleted_rows 200, batches 2; the next run resumes"
    )
    assert_closed(deleted_rows=200)
    assert json.loads(command("run", WORKER, "--json").stdout)["counts"]["deleted_rows"] == 100
    assert "result: it was interrupted, by Ctrl-C or SIGTERM" in command("runs", str(result["run_id"])).stdout


def test_batch_in_progress_is_committed_before_the_run_ends(running: Started, parcels: None) -> None:
    process = running(PARCELS, WAITS_BY="interrupt_the_process")

    result, _ = ended(process)

    assert (result["outcome"], result["reason"]) == ("partial", "shutdown")
    assert result["counts"]["deleted_rows"] >= 5, "with the row whose call the signal met"


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("waits_by", ["sleep", "ask_object_store"])
def test_second_signal_ends_the_process_at_once(
    running: Started, parcels: None, silent_server: str, tmp_path: Path, waits_by: str, number: signal.Signals
) -> None:
    process = running(PARCELS, WAITS_BY=waits_by, ENDPOINT=silent_server)
    eventually((tmp_path / "called").exists)

    while process.poll() is None:
        process.send_signal(number)
    said, logged = process.communicate()

    assert (process.returncode, said) == (128 + number, "")
    assert logged.splitlines()[-1].startswith("housekeeping: ended at once; committed batches stay")


def test_dry_run_ends_during_a_long_statement(
    running: Started, add: Callable[[int], None], admin: Connection, settings: Settings
) -> None:
    add(1)
    with admin.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"LOCK TABLE {settings.namespace}.user_statuses")
    process = running(WORKER, "--dry-run")
    eventually(lambda: _waits_for_table(admin, settings))

    process.send_signal(signal.SIGINT)
    said, logged = process.communicate(timeout=30)

    assert (process.returncode, said, logged) == (130, "", "housekeeping: interrupted\n")


def _waits_for_table(admin: Connection, settings: Settings) -> bool:
    with admin.cursor() as cursor:
        cursor.execute(
            "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = %s::regclass",
            [f"{settings.namespace}.user_statuses"],
        )
        return cursor.fetchone() is not None
