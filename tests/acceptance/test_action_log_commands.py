"""Every command that changes something is in the action log."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest
import redis

from housekeeping import ExclusiveLease, Settings
from tests.acceptance.conftest import Command
from tests.acceptance.session_sweeps import NAME as SWEEP
from tests.acceptance.session_sweeps import sessions_module
from tests.internals.database import Database
from tests.internals.ledger import NOW, Run, logged_actions
from tests.internals.middleware import key_prefix
from tests.unit.cli.test_help import CHANGING, READING

#: Starts many processes.
pytestmark = pytest.mark.slow

#: They create and remove the tables, the log among them, and change no work of the workers.
NOT_LOGGED: Final = {("init",), ("uninstall",)}
#: Command -> its arguments, and its action and target in the log. In an order in which each has something to change.
LOGGED: Final = {
    ("pause",): ([SWEEP], "pause", SWEEP),
    ("narrow",): ([SWEEP, "--batch-size", "1"], "narrow", SWEEP),
    ("resume",): ([SWEEP], "resume", SWEEP),
    ("run",): ([SWEEP, "--force"], "run", SWEEP),
    ("stop",): (["1"], "stop", "1"),
    ("restore",): (["1"], "restore", SWEEP),
    ("purge",): (["user_session", "--where", "true", "--yes"], "purge", "purge:user_session"),
    ("enqueue",): ([SWEEP], "run", SWEEP),
    ("acknowledge",): (["last_run"], "acknowledge", "last_run"),
    ("erase",): (["--rekey", "--yes"], "rekey", "erasures"),
    ("leases", "release"): (["lease"], "release_lease", "lease"),
    ("dedup", "release"): (["work:1"], "release_key", "work:1"),
    ("deadletters", "requeue"): (["--all", "--yes"], "requeue", "0 dead letters: all"),
    ("deadletters", "delete"): (["--all", "--yes"], "delete", "0 dead letters: all"),
}

#: Exit status of reading commands on a read-only database without a dead letter.
STATUS: Final = {("doctor",): 1, ("deadletters", "show"): 2, ("export",): 2, ("receipt",): 2}


@pytest.fixture
def shop(command: Command, postgres: Database, tmp_path: Path, environment: dict[str, str]) -> None:
    """An application with three expired sessions, and an archive for them."""
    (tmp_path / "logged_shop.py").write_text(sessions_module('Delete(archive_to="old_sessions")'))
    environment["HOUSEKEEPING_SWEEPS"] = "logged_shop"
    environment["HOUSEKEEPING_ERASURE_KEY"] = "a-secret-of-the-tests-of-erasures"
    postgres.execute_sql("CREATE TABLE user_session (token text PRIMARY KEY, expires_at timestamptz NOT NULL)")
    postgres.execute_sql("INSERT INTO user_session SELECT n, now() FROM generate_series(1, 3) AS n")
    assert command("init", "--with-archives").returncode == 0


def test_every_changing_command_is_logged(  # O1
    shop: None, command: Command, redis_client: redis.Redis, settings: Settings
) -> None:
    assert ExclusiveLease("lease", timedelta(minutes=1)).try_obtain() is not None
    key = f"{key_prefix(settings.namespace)}work:1"
    redis_client.hset(key, mapping={"id": "message", "state": "waiting"})
    redis_client.expire(key, 60)

    for words, (arguments, *_) in LOGGED.items():
        if words == ("acknowledge",):
            times = dict.fromkeys(("started_at", "heartbeat_at", "finished_at"), NOW)
            Run.create(worker=SWEEP, trigger="cli", outcome="failed", reason="gone", **times)
        ended = command(*words, *arguments)
        assert ended.returncode == 0, ended.stderr

    assert {*LOGGED, *NOT_LOGGED} == {*CHANGING}
    logged = list(reversed(logged_actions(100)))
    assert [(each.action, each.target) for each in logged] == [(action, on) for _, action, on in LOGGED.values()]
    results = {each.action: each.result for each in logged}
    assert (results["restore"], results["purge"]) == ("run 2 done (restore of run 1)", "run 3 done")


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_reading_command_writes_no_row(
    shop: None, command: Command, environment: dict[str, str], words: tuple[str, ...]
) -> None:
    read_only = f"{environment['HOUSEKEEPING_DATABASE_URL']}%20-cdefault_transaction_read_only%3Don"

    ended = command(*words, *READING[words], DATABASE_URL=read_only)

    assert (ended.returncode, "read-only transaction" in ended.stderr) == (STATUS.get(words, 0), False), ended


def test_change_that_is_not_carried_out_is_not_logged(shop: None, command: Command) -> None:
    where = ("user_session", "--where", "true")
    ran = json.loads(command("run", SWEEP, "--json").stdout)

    command("purge", *where, "--dry-run")
    command("purge", *where)
    command("restore", str(ran["run_id"]), "--dry-run")

    assert (ran["outcome"], logged_actions(10)) == ("done", [])
