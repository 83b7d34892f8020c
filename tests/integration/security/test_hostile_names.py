"""Terminal escape sequences and markup in names from the database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.installation import PROJECT, Installation
from tests.integration.security.secrets_everywhere import dashboard, pages
from tests.internals.core import logs
from tests.internals.middleware import key_prefix
from tests.internals.workers import pending_entry
from tests.unit.core.conftest import root_as_before as root_as_before

#: Terminal escapes and look-alikes: colors, the window title, a forged line, text in reversed order;
#: also a name that looks like a command-line option, and one with line breaks.
HOSTILE = "\x1b[31m\x1b]0;owned\x07\r\nALARM forged: all is lost\u202e<script>alert(1)</script>"
NAMES = (f"--force {HOSTILE}", f"{HOSTILE}{'x' * 800}")
CLEANUP = "batched_git_ref_updates.project_cleanup"
UPLOADS = "object_storage.delete_stale_direct_uploads"
WORKER = "user_status_cleanup.batch"


def _control_characters(text: str) -> set[str]:
    return {character for character in text if character != "\n" and not character.isprintable()}


def _forged(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip().startswith("ALARM forged")]


@pytest.fixture
def hostile(installation: Installation) -> Installation:
    """Create refs and object paths with hostile names, in order, and a lease with such a name."""
    table = f"{installation.settings.namespace}.batched_git_ref_updates_deletions"
    with installation.admin.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET id = id + 1000")
        for number, name in enumerate(NAMES, start=1):
            cursor.execute(f"INSERT INTO {table} (id, project_id, ref) VALUES (%s, %s, %s)", (number, PROJECT, name))
    client = installation.client
    client.hset(pending_entry.KEY, mapping={f"artifacts:{name}": 1 for name in (*NAMES, "\x1b[2J/../climbs out")})
    client.set(f"{installation.settings.namespace}:lease:{HOSTILE}", "somebody", px=600_000)
    key = f"{key_prefix(installation.settings.namespace)}{HOSTILE}"
    client.hset(key, mapping={"id": HOSTILE, "state": "waiting"})
    client.pexpire(key, 600_000)
    return installation


@pytest.mark.parametrize(
    "line",
    [f"plan {CLEANUP} {PROJECT}", f"run {CLEANUP} {PROJECT}", f"run {UPLOADS}", "status", "leases list", "dedup list"],
)
def test_terminal_output_escapes_hostile_names(hostile: Installation, line: str) -> None:
    ended = hostile.command(*line.split(), LOG_FORMAT="console")

    shown = ended.stdout + ended.stderr
    assert ended.returncode == 0
    assert "\\x1b[31m" in shown
    assert (_control_characters(shown), _forged(shown)) == (set(), [])


def test_error_that_quotes_a_hostile_name_is_escaped(hostile: Installation) -> None:
    with hostile.admin.cursor() as cursor:
        cursor.execute(f"SET search_path TO {hostile.settings.namespace}")
        cursor.execute(
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION "
            f"'%', E'{HOSTILE.encode('unicode_escape').decode()}' USING ERRCODE = '55000'; END $$"
        )
        cursor.execute("CREATE TRIGGER fail BEFORE DELETE ON user_statuses EXECUTE FUNCTION fail()")

    ended = [hostile.command(*line.split(), LOG_FORMAT="console") for line in (f"run {WORKER}", "status")]

    shown = [each.stdout + each.stderr for each in ended]
    assert ["\\x1b[31m" in text for text in shown] == [True, True]
    assert [(_control_characters(text), _forged(text)) for text in shown] == [(set(), [])] * 2


def test_json_output_has_unmodified_hostile_names(hostile: Installation) -> None:
    planned = json.loads(hostile.command("plan", CLEANUP, PROJECT, "--json").stdout)

    assert [row["ref"] for row in planned["stages"][0]["samples"][:2]] == list(NAMES)


@pytest.mark.slow
def test_pages_show_hostile_names_as_text(hostile: Installation, tmp_path: Path) -> None:
    hostile.command("run", CLEANUP, PROJECT)
    hostile.command("run", UPLOADS)

    with dashboard(hostile.environment, tmp_path / "web.log") as (address, _):
        seen = pages(address)

    assert "&lt;script&gt;alert(1)" in seen[address]
    assert [page for page, text in seen.items() if "<script>alert" in text] == []


def test_readable_log_lines_escape_what_json_escapes(root_as_before: None, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", "console")

    logs.logger("a").info(f"event {HOSTILE}", ref=HOSTILE, record={"ref": HOSTILE}, refs=[HOSTILE])
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logs.logger("a").exception("failed")

    said = capsys.readouterr().err
    assert said.count("\\x1b[31m") == 5
    assert _control_characters(said) == set()
