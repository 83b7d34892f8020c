"""The command ``status`` for one worker, for scripts and in a loop."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import pytest
import redis
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.acceptance.conftest import Command
from tests.acceptance.processes import read_terminal
from tests.internals.embedded import embedded

#: Starts many processes.
pytestmark = pytest.mark.slow

WORKER = "user_status_cleanup.batch"
OTHER = "ci.stuck_jobs"


def test_status_of_one_worker_leaves_the_others_out(command: Command, add: Callable[[int], None]) -> None:
    add(3)

    shown, found = command("status", WORKER), json.loads(command("status", WORKER, "--json").stdout)

    assert [each["worker"] for each in found["workers"]] == [WORKER]
    assert list(found["queues"]) == ["cronjob"]
    assert (WORKER in shown.stdout, OTHER in shown.stdout) == (True, False)


def test_problems_leaves_workers_without_one_out(command: Command, add: Callable[[int], None]) -> None:
    command("pause", WORKER, "--reason", "migration")

    shown, found = (command("status", "--problems", *words).stdout for words in ((), ("--json",)))

    assert [each["worker"] for each in json.loads(found)["workers"] if not each["not_set_up"]] == [WORKER]
    assert f"{WORKER} is paused until it is resumed: migration" in shown
    assert "without a problem" in shown and "housekeeping.old_runs" not in shown


def test_status_of_an_unknown_worker_is_an_error(command: Command, made: None) -> None:
    finished = command("status", "user_status_cleanup.bach")

    assert (finished.returncode, f"did you mean {WORKER}?" in finished.stderr) == (2, True)


def test_alert_fails_the_command_only_when_asked(command: Command, made: None) -> None:
    asked, plain = command("status", WORKER, "--fail-on-alert"), command("status", WORKER)

    assert (asked.returncode, plain.returncode, asked.stderr) == (1, 0, "")
    assert "no worker has sent a heartbeat yet" in asked.stdout and "no worker has sent a heartbeat yet" in plain.stdout


@pytest.fixture
def own_redis() -> Iterator[str]:
    """Return the URL of a dedicated server, which a test may suspend."""
    with embedded.start(postgres=False) as servers:
        yield servers.redis_url


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_redis_that_does_not_answer_fails_the_command_only_when_asked(
    command: Command, made: None, own_redis: str, fault: signal.Signals
) -> None:
    pid = redis.Redis.from_url(own_redis).info("server")["process_id"]
    os.kill(pid, fault)
    try:
        asked, plain, as_json = (
            command("status", WORKER, *words, REDIS_URL=own_redis)
            for words in (["--fail-on-alert"], [], ["--fail-on-alert", "--json"])
        )
    finally:
        if fault is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)

    assert (asked.returncode, plain.returncode, as_json.returncode) == (1, 0, 1)
    [line] = [each for each in asked.stdout.splitlines() if "did not answer" in each]
    assert line.startswith("UNAVAILABLE Redis did not answer") and line.endswith("not shown: queues, processes, leases")
    assert "Redis did not answer" in json.loads(as_json.stdout)["redis"]


def test_watch_prints_an_object_per_line(
    environment: dict[str, str], add: Callable[[int], None], tmp_path: Path
) -> None:
    words = ["status", WORKER, "--watch", "--interval", "0.1", "--json"]
    with _started(words, environment, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        add(3)
        backlogs = (json.loads(line)["workers"][0]["backlog"] for line in watching.stdout)
        seen = next(backlog for backlog in backlogs if backlog)
        watching.send_signal(signal.SIGINT)

    assert (first["workers"][0]["backlog"], seen) == (0, 3)
    assert watching.wait(60) == 130


def test_watch_ends_at_the_first_alert_when_asked(command: Command, made: None) -> None:
    finished = command("status", "--watch", "--interval", "0.1", "--fail-on-alert")

    assert (finished.returncode, finished.stdout.count("Ctrl-C ends")) == (1, 1)


def test_watch_redraws_the_terminal_until_ctrl_c(environment: dict[str, str], made: None, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    words = ["status", WORKER, "--watch", "--interval", "0.1"]
    with _started(words, environment | {"TERM": "xterm"}, tmp_path, stdout=terminal, stderr=terminal) as watching:
        os.close(terminal)
        shown = b""
        while shown.count(b"Ctrl-C ends") < 2:
            shown += os.read(controller, 4096)
        watching.send_signal(signal.SIGINT)
        watching.wait(60)

    assert watching.returncode == 130
    assert b"\x1b[2J" in shown and b"Traceback" not in shown


def test_watch_goes_on_after_an_outage(
    environment: dict[str, str], made: None, admin: Connection, settings: Settings, tmp_path: Path
) -> None:
    url = urlsplit(str(settings.database_url))
    folder = dict(parse_qsl(url.query)).get("host", "")
    if not folder.startswith("/"):
        pytest.skip("the server is not reached through a socket's folder")
    # A link to the folder of the socket, which an outage takes away.
    link, name = tmp_path / "s", f"watch_{settings.namespace}"
    link.symlink_to(folder)
    query = urlencode({**dict(parse_qsl(url.query)), "host": str(link), "application_name": name}, quote_via=quote)
    given = environment | {"HOUSEKEEPING_DATABASE_URL": urlunsplit(url._replace(query=query))}
    words = ["status", WORKER, "--watch", "--interval", "0.1", "--json"]
    with _started(words, given, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as watching:
        assert watching.stdout is not None
        found = (json.loads(line) for line in watching.stdout)
        before = next(found)
        link.unlink()
        with admin.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", (name,)
            )
        away = next(each for each in found if "error" in each)
        link.symlink_to(folder)
        after = next(each for each in found if "error" not in each)
        watching.send_signal(signal.SIGINT)

    assert "PostgreSQL did not answer" in away["error"]
    assert [each["workers"][0]["worker"] for each in (before, after)] == [WORKER, WORKER]


@pytest.mark.parametrize("no_color", [False, True])
def test_colors_need_a_terminal_and_no_no_color(
    environment: dict[str, str], command: Command, add: Callable[[int], None], tmp_path: Path, no_color: bool
) -> None:
    add(10_001)
    controller, terminal = pty.openpty()
    given = environment | {"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {})
    with _started(["status"], given, tmp_path, stdout=terminal) as showing:
        os.close(terminal)
        shown = b""
        while piece := read_terminal(controller):
            shown += piece
        showing.wait(60)
    piped = command("status").stdout

    red = b"\x1b[1;31m"
    assert b"ALERT" in shown and (red in shown) == (not no_color)
    assert "ALERT" in piped and "\x1b" not in piped


def _started(words: list[str], environment: dict[str, str], folder: Path, **streams: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "housekeeping", *words], env=environment, cwd=folder, text=True, **streams
    )
