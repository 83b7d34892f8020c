"""``housekeeping erase`` and ``export``: what they show, ask, change and record."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest
import redis

from housekeeping import Settings
from tests.acceptance.conftest import Command
from tests.acceptance.processes import eventually
from tests.acceptance.test_narrow_terminal import too_wide
from tests.integration.erasure import shop
from tests.integration.erasure.shop import ERASED, MARKER, MARKER_ID, rows
from tests.internals.database import Database, database
from tests.internals.ledger import NOW, SILENCE, Erasure, Run, logged_actions

#: Starts many processes.
pytestmark = pytest.mark.slow

SECRET = "a-secret-of-the-tests-of-erasures"
NEW_SECRET = "another-secret-of-the-tests-of-erasures"
MODULE = """
from dataclasses import replace
from housekeeping import Delete, Rows, Sweep
from tests.integration.erasure.shop import PERSON
SUBJECTS = (PERSON,)
DELETE = Delete(dependents={"orders": "delete"})
SWEEPS = (Sweep("shop.old", Rows("account", stale=lambda row: row.id < 0, action=DELETE)),)
"""
PERSON = ("person", str(MARKER_ID))


@pytest.fixture(autouse=True)
def shop_with_customers(
    postgres: Database, redis_client: redis.Redis, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "erasing_shop.py").write_text(MODULE)
    environment |= {"HOUSEKEEPING_SWEEPS": "erasing_shop", "HOUSEKEEPING_ERASURE_KEY": SECRET}
    shop.create()


def has_no_identity(*texts: str) -> bool:
    return all(MARKER not in text and str(MARKER_ID) not in text for text in texts)


def test_erasure_is_done_and_has_a_receipt_and_no_identity(command: Command) -> None:
    ended = command("erase", *PERSON, "--reason", "ticket 12", "--requester", "privacy form", "--yes")

    record = json.loads(command("erasures", "--json").stdout)["erasures"][0]
    assert (ended.returncode, record["state"], record["reason"]) == (0, "done", "ticket 12"), ended.stderr
    assert record["requester"] == "privacy form"
    assert ended.stdout.endswith(f"erasure {record['id']} is done; its receipt: housekeeping receipt {record['id']}\n")
    assert rows() == ERASED
    assert record["counts"]["session"] == {"deleted": 5}
    shown = command("receipt", str(record["id"])).stdout, command("erasures").stdout, json.dumps(record)
    assert has_no_identity(ended.stdout, ended.stderr, *shown)
    [action] = logged_actions(10)
    assert (action.action, action.target) == ("erase", f"person {record['key_hmac']}")
    assert "@" in action.user
    assert action.result == f"erasure {record['id']} done"


def test_dry_run_shows_the_tree_and_changes_nothing(command: Command, environment: dict[str, str]) -> None:
    before = rows()
    environment["COLUMNS"] = "80"

    shown = command("erase", *PERSON, "--dry-run")
    found = json.loads(command("erase", *PERSON, "--dry-run", "--json").stdout)

    assert (shown.returncode, rows(), list(Erasure.select())) == (0, before, [])
    assert has_no_identity(shown.stdout, shown.stderr, json.dumps(found))
    assert too_wide(shown.stdout) == []
    assert {each["link"]: (each["depth"], each["decision"], each["rows"]) for each in found["links"]} == {
        None: (0, "delete", 1),
        "attachment.owner_id": (1, "delete", 1),
        "audit_entry.account_id": (1, "keep", 1),
        "comment.author_id": (1, "anonymise", 2),
        "comment.parent_id": (2, "keep", 1),
        "newsletter.email": (1, "delete", 1),
        "orders.account_id": (1, "anonymise", 4),
        "item.order_id": (2, "delete", 8),
        "session.account_id": (1, "delete", 5),
    }
    links = [each["link"] for each in found["links"]]
    assert links.index("item.order_id") == links.index("orders.account_id") + 1
    words = " ".join(shown.stdout.split())
    assert "tax law: 10 years" in words
    assert "not reached: shop.old changes comment.author_id; erasures no longer find these rows" in words
    assert any("shop.old changes comment.author_id" in each for each in found["outside"])


def test_without_a_terminal_nothing_is_erased_without_yes(command: Command) -> None:
    before = rows()

    asked = command("erase", *PERSON)
    as_json = command("erase", *PERSON, "--json")

    assert [asked.returncode, as_json.returncode] == [2, 2]
    assert "22 rows in 7 tables?" in asked.stderr and "add --yes" in asked.stderr
    assert rows() == before and not Erasure.select().exists()
    assert has_no_identity(asked.stderr, asked.stdout, as_json.stderr)


def test_wrong_request_exits_with_2_without_the_key(command: Command) -> None:
    before = rows()
    wrong: list[tuple[str, ...]] = [
        ("person", "4"),
        ("person", "not a number"),
        ("tenant", "1"),
        ("person", str(MARKER_ID), "--reason", f"{MARKER_ID} wants it"),
        ("person", str(MARKER_ID), "--requester", f"customer {MARKER_ID}"),
        ("person", str(MARKER_ID), "--reason", "ticket \udcff"),
        ("person", str(MARKER_ID), "--requester", "\udcff"),
        ("person",),
        (),
        ("person", "1", "--rekey"),
        ("person", "1", "--receipts", "erasing_shop.py"),
    ]

    refused = [(arguments, command("erase", *arguments, "--yes")) for arguments in wrong]

    for arguments, each in refused:
        assert (each.returncode, each.stdout, len(each.stderr.splitlines())) == (2, "", 1), arguments
        assert not [key for key in arguments[1:2] if len(key) > 3 and key in each.stderr]
    assert rows() == before and not Erasure.select().exists()


def test_table_without_a_decision_is_refused_and_recorded(command: Command, postgres: Database) -> None:
    postgres.execute_sql("CREATE TABLE forgotten (id bigint PRIMARY KEY, account_id bigint REFERENCES account)")
    before = rows()

    planned = command("erase", *PERSON, "--dry-run")
    refused = command("erase", *PERSON, "--yes")

    assert (planned.returncode, refused.returncode, rows()) == (2, 2, before)
    for text in (planned.stderr, refused.stderr):
        assert "forgotten.account_id" in text and has_no_identity(text)
    assert [each.state for each in Erasure.select()] == ["refused"]


ASKED = [("erase", "--yes"), ("erase", "--dry-run"), ("export",)]


def test_column_of_the_key_that_does_not_exist_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "erasing_shop.py").write_text(MODULE + "SUBJECTS = (replace(PERSON, by='emial'),)")
    before = rows()

    refused = [command(name, "person", key, *flags) for name, *flags in ASKED for key in (MARKER, str(MARKER_ID))]

    for each in refused:
        assert (each.returncode, each.stdout) == (2, "")
        assert "no column 'emial', which by of Subject('person') names; it has email, id" in each.stderr
    assert rows() == before and not Erasure.select().exists()


def test_key_that_does_not_name_one_row_is_refused(command: Command, postgres: Database, tmp_path: Path) -> None:
    postgres.execute_sql("ALTER TABLE account ADD full_name text DEFAULT 'Twin'")
    (tmp_path / "erasing_shop.py").write_text(MODULE + "SUBJECTS = (replace(PERSON, by='full_name'),)")
    before = rows()

    refused = [command(name, "person", "Twin", *flags) for name, *flags in ASKED]

    line = "several rows of account have this value in the column full_name, the `by` of Subject('person'); "
    for each in refused:
        assert (each.returncode, each.stdout) == (2, "")
        assert f"{line}give the primary key instead" in each.stderr and "Twin" not in each.stderr
    assert rows() == before and not Erasure.select().exists()


def test_much_of_a_table_is_refused_until_it_is_confirmed(command: Command, postgres: Database) -> None:
    postgres.execute_sql("INSERT INTO session SELECT n, %s FROM generate_series(100, 1200) AS n", (MARKER_ID,))
    before = rows()

    planned = command("erase", *PERSON, "--dry-run")
    refused = command("erase", *PERSON, "--yes")
    kept = rows()
    confirmed = command("erase", *PERSON, "--yes", "--confirm")

    assert [each.returncode for each in (planned, refused, confirmed)] == [0, 2, 0], confirmed.stderr
    for text in (" ".join(planned.stdout.split()), refused.stderr.strip()):
        assert "1,106 of about 1,109 rows of session belong to this person" in text and has_no_identity(text)
        assert text.endswith("then: housekeeping erase person KEY --confirm")
    assert (kept, rows()) == (before, ERASED)
    assert sorted(each.state for each in Erasure.select()) == ["done", "refused"]


def test_unset_secret_exits_with_2(command: Command) -> None:
    assert command("erase", *PERSON, "--yes", ERASURE_KEY="").returncode == 2


def restore(postgres: Database) -> None:
    """Bring back the rows as they were before the erasure, as the restore of a backup does."""
    postgres.execute_sql(f"TRUNCATE {', '.join(ERASED)}")
    postgres.execute_sql(shop.ROWS, {"id": MARKER_ID, "mail": MARKER})


def test_replay_erases_who_is_back_after_a_restore(command: Command, postgres: Database) -> None:
    command("erase", *PERSON, "--yes")
    restore(postgres)

    planned = command("erase", "--replay-since", "1h", "--dry-run")
    replayed = command("erase", "--replay-since", "1h", "--yes", "--json")
    later = command("erase", "--replay-since", "1h", "--yes")

    assert (planned.returncode, replayed.returncode, later.returncode) == (0, 0, 0), replayed.stderr
    found = json.loads(replayed.stdout)
    assert [each["id"] for each in found["back"]] == [1]
    assert [(each["state"], each["reason"]) for each in found["erasures"]] == [
        ("done", "again after a restore; erased before as 1")
    ]
    assert rows() == ERASED and "none of the subjects of 2 erasures exists" in later.stdout
    assert has_no_identity(planned.stdout, replayed.stdout, replayed.stderr)


def test_replay_that_finds_no_erasure_since_the_time_fails(
    command: Command, postgres: Database, tmp_path: Path
) -> None:
    command("erase", *PERSON, "--yes")
    Erasure.update(ended_at=NOW - timedelta(hours=2)).execute()
    restore(postgres)

    before = rows()

    (tmp_path / "receipts.jsonl").write_text(command("erasures", "--receipts").stdout)
    alone = command("erase", "--replay-since", "1h", "--yes")
    with_file = command("erase", "--replay-since", "1h", "--receipts", "receipts.jsonl", "--dry-run", "--json")

    assert (alone.returncode, with_file.returncode, alone.stdout, rows()) == (1, 1, "", before)
    assert "no receipts were given" in alone.stderr and "the file has no receipts" in with_file.stderr
    for each in (alone, with_file):
        assert "no erasures since then were found" in each.stderr and "--receipts FILE" in each.stderr
    assert json.loads(with_file.stdout)["back"] == []


def test_replay_reads_saved_receipts_if_the_ledger_was_restored_too(
    command: Command, postgres: Database, tmp_path: Path
) -> None:
    command("erase", *PERSON, "--yes")
    (tmp_path / "receipts.jsonl").write_text(command("erasures", "--receipts").stdout)
    Erasure.delete().execute()
    restore(postgres)

    replayed = command("erase", "--replay-since", "1h", "--receipts", "receipts.jsonl", "--yes")
    (tmp_path / "receipts.jsonl").write_text((tmp_path / "receipts.jsonl").read_text().replace('"done"', '"failed"'))
    changed = command("erase", "--replay-since", "1h", "--receipts", "receipts.jsonl", "--yes")

    assert (replayed.returncode, changed.returncode, rows()) == (0, 1, ERASED), replayed.stderr


def test_replay_uses_all_lines_of_a_file_but_the_damaged_ones(
    command: Command, postgres: Database, tmp_path: Path
) -> None:
    command("erase", *PERSON, "--yes")
    [line] = command("erasures", "--receipts").stdout.splitlines()
    restore(postgres)
    lines = ['{"id": 7, "cut', line.replace('"done"', '"failed"'), "", line, "\x00", line]
    (tmp_path / "receipts.jsonl").write_text("\n".join(lines))

    replayed = command("erase", "--replay-since", "1h", "--receipts", "receipts.jsonl", "--yes", "--json")

    assert (replayed.returncode, rows()) == (1, ERASED), replayed.stderr
    assert json.loads(replayed.stdout)["unusable_lines"] == [1, 2, 5]
    for text in (
        "line 1: this is no receipt",
        "line 2: the receipt was changed",
        "3 lines of the file could not be used",
    ):
        assert text in replayed.stderr


def test_numbers_of_saved_receipts_are_not_given_again_after_a_restore(
    command: Command, postgres: Database, tmp_path: Path
) -> None:
    for _ in range(3):
        command("erase", *PERSON, "--yes")
    (tmp_path / "receipts.jsonl").write_text(command("erasures", "--receipts").stdout)
    postgres.execute_sql(f"TRUNCATE {Erasure._meta.schema}.erasures RESTART IDENTITY")
    restore(postgres)

    replayed = command("erase", "--replay-since", "1h", "--receipts", "receipts.jsonl", "--yes")

    assert replayed.returncode == 0, replayed.stderr
    assert [(each.id, each.state) for each in Erasure.select()] == [(4, "done")]


def test_replay_finds_erasures_of_a_former_secret(command: Command, postgres: Database) -> None:
    command("erase", *PERSON, "--yes")
    restore(postgres)

    replayed = command("erase", "--replay-since", "1h", "--yes", ERASURE_KEY=f"{NEW_SECRET},{SECRET}")

    assert (replayed.returncode, rows()) == (0, ERASED), replayed.stderr


def test_lost_secret_is_refused_until_it_is_given_up(command: Command, postgres: Database) -> None:
    command("erase", *PERSON, "--yes")
    restore(postgres)

    lost = {"ERASURE_KEY": NEW_SECRET}
    refused = [command("erase", *words, "--yes", **lost) for words in (PERSON, ("--replay-since", "1h"))]
    rekeyed = command("erase", "--rekey", "--yes", **lost)
    replayed = command("erase", "--replay-since", "1h", "--yes", **lost)
    erased = command("erase", *PERSON, "--yes", **lost)

    assert [each.returncode for each in refused] == [2, 2]
    assert "lacks the secret of 1 earlier erasure" in refused[0].stderr
    assert (rekeyed.returncode, rekeyed.stdout) == (0, "1 erasure marked as lost\n")
    assert replayed.returncode == 1 and "1 erasure cannot be repeated" in replayed.stdout
    assert (erased.returncode, rows()) == (0, ERASED)
    assert [each.action for each in logged_actions(10)] == ["erase", "rekey", "erase"]


def exported(command: Command, *arguments: str) -> list[Any]:
    ended = command("export", *arguments)
    assert ended.returncode == 0, ended.stderr
    assert has_no_identity(ended.stderr)
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_export_has_all_rows_of_the_person_in_the_order_of_the_tables(command: Command) -> None:
    lines = exported(command, *PERSON)

    tables = [each["table"] for each in lines]
    assert list(dict.fromkeys(tables)) == [
        *("account", "attachment", "audit_entry", "comment", "newsletter", "orders", "session", "item")
    ]
    numbers = {table: tables.count(table) for table in tables}
    assert (numbers["session"], numbers["item"], numbers["orders"]) == (5, 8, 4)
    assert {each["decision"] for each in lines if each["table"] == "orders"} == {"anonymise"}
    comments = [each["row"]["id"] for each in lines if each["table"] == "comment"]
    assert comments == [1, 3]  # the reply of another person is not theirs
    [action] = logged_actions(10)
    assert (action.action, action.result, has_no_identity(action.target)) == ("export", "23 rows", True)


def test_values_of_an_export_have_the_documented_form(command: Command, postgres: Database) -> None:
    postgres.execute_sql(
        "ALTER TABLE session ADD data bytea, ADD tags text[], ADD info json, ADD seen timestamptz, ADD born date, "
        "ADD price numeric, ADD ratio float8, ADD note text"
    )
    postgres.execute_sql(
        "UPDATE session SET data = decode('00ff', 'hex'), tags = '{a,NULL}', info = %s, seen = %s, "
        "born = '1952-03-11', price = 12345678901234567890.10, ratio = 'NaN', note = %s WHERE id = 1",
        ('{"a":\n[1]}', "2026-05-01 12:00+02", SECRET),
    )
    [row] = [
        each["row"] for each in exported(command, *PERSON) if each["row"]["id"] == 1 and each["table"] == "session"
    ]
    text = command("export", *PERSON).stdout

    del row["id"], row["account_id"], row["price"]
    assert '"price":12345678901234567890.10' in text
    assert row == {
        "data": "\\x00ff",
        "tags": ["a", None],
        "info": {"a": [1]},
        "seen": "2026-05-01T10:00:00+00:00",
        "born": "1952-03-11",
        "ratio": "NaN",
        "note": "***",
    }


def test_export_to_a_file_is_readable_by_its_owner_only(command: Command, tmp_path: Path) -> None:
    ended = command("export", *PERSON, "--to", "person.jsonl")
    refused = command("export", *PERSON, "--to", "nowhere/person.jsonl")

    path = tmp_path / "person.jsonl"
    assert (ended.returncode, ended.stdout, refused.returncode) == (0, "", 2)
    assert len(path.read_text().splitlines()) == 23 and path.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir() if each.suffix != ".py" and each.is_file()) == [path.name]


def test_export_replaces_neither_a_link_nor_a_pipe(command: Command, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("person.jsonl")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    ended = [command("export", *PERSON, "--to", name) for name in ("pipe", "link", ".")]
    piped = os.read(reading, 1 << 16).decode()
    os.close(reading)

    assert [each.returncode for each in ended] == [0, 0, 2], ended[0].stderr
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert piped == (tmp_path / "person.jsonl").read_text() and len(piped.splitlines()) == 23


def test_export_of_an_erased_person_exits_with_2(command: Command) -> None:
    command("erase", *PERSON, "--yes")

    ended = command("export", *PERSON)

    assert (ended.returncode, ended.stdout) == (2, "") and has_no_identity(ended.stderr)


@contextmanager
def waiting(
    arguments: tuple[str, ...], environment: dict[str, str], folder: Path, wait_event: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a command that waits for a lock in the database; kill it at the end of the block."""
    (folder / "erasing_shop.py").write_text(MODULE)
    command = [sys.executable, "-m", "housekeeping", *arguments]
    paths = f"{Path(__file__).parents[2]}{os.pathsep}{folder}"
    given = {**environment, "PYTHONPATH": paths}
    with subprocess.Popen(command, env=given, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = %s"
            eventually(lambda: process.poll() or database.execute_sql(sql, (wait_event,)).fetchone()[0])
            assert process.poll() is None
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("arguments", [("export", *PERSON), ("erase", "person", MARKER, "--yes")])
def test_key_of_a_running_command_is_not_in_the_list_of_processes(
    environment: dict[str, str], settings: Settings, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """The command waits for a table that another session has locked."""
    if not Path("/proc/self/cmdline").exists():
        pytest.skip("no /proc on this system")
    other = psycopg2.connect(settings.require_database_url())
    with other, other.cursor() as cursor:
        cursor.execute("LOCK TABLE account IN ACCESS EXCLUSIVE MODE")
        with waiting(arguments, environment, tmp_path, "relation") as process:
            own = psutil.Process(process.pid)
            shown = [" ".join(each.cmdline()) for each in (own, *own.children(recursive=True))]
    other.close()

    assert arguments[0] in shown[0] and has_no_identity(*shown)


def test_killed_erasure_names_the_time_after_which_it_can_continue(
    command: Command, environment: dict[str, str], settings: Settings, tmp_path: Path
) -> None:
    """The killed command waits in a trigger for a lock that another session has."""
    database.execute_sql(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_advisory_xact_lock(471147); RETURN OLD; END $$; "
        "CREATE TRIGGER wait BEFORE DELETE ON session FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    other = psycopg2.connect(settings.require_database_url())
    with other, other.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(471147)")
        with waiting(("erase", *PERSON, "--yes"), environment, tmp_path, "advisory"):
            pass
    other.close()

    early = command("erase", *PERSON, "--yes")
    Run.update(heartbeat_at=NOW - 2 * SILENCE).where(Run.outcome.is_null()).execute()
    later = command("erase", *PERSON, "--yes")

    assert (early.returncode, later.returncode, rows()) == (1, 0, ERASED), early.stderr
    found = re.search(r"if that process was killed, it can continue in (\d+) (s|min); the same command", early.stderr)
    assert found is not None, early.stderr
    assert 0 < int(found[1]) * {"s": 1, "min": 60}[found[2]] <= SILENCE.total_seconds(), early.stderr
