"""``housekeeping erasures`` and ``receipt``: the list, the signed receipts, and the check of a saved receipt."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Command
from tests.acceptance.test_narrow_terminal import too_wide
from tests.internals.database import Database
from tests.internals.ledger import Erasure, record_action

#: Starts many processes.
pytestmark = pytest.mark.slow

SECRET = "a-secret-of-the-tests-of-erasures"
NOW = datetime.now(UTC)


@pytest.fixture(autouse=True)
def secret(environment: dict[str, str]) -> None:
    environment["HOUSEKEEPING_ERASURE_KEY"] = SECRET


@pytest.fixture
def ended(postgres: Database) -> int:
    """An erasure of the person 4711 that has ended; its ID."""
    return add(
        counts={"session": {"deleted": 1200}, "orders": {"anonymised": 2}},
        kept={"orders": "tax law: 10 years", "audit_log": "security log", "item": "of orders"},
        proof={"passes": 1, "left": {"session": 0, "orders": 0}, "kept": {"audit_log": 1, "item": 10_000}},
        outside=["backups"],
        reason="ticket 12",
    )


def add(state: str = "done", **more: Any) -> int:
    is_open = state in ("requested", "running")
    values: dict[str, Any] = {"key": ["4711"], "found": {"email": "eve@example.com"}} if is_open else {"ended_at": NOW}
    values |= {
        "started_at": NOW - timedelta(minutes=1),
        "subject": "person",
        "key_hmac": f"{'5fa7' * 16}.1c2d3e4f",
        "requester": "dpo@desk",
        "state": state,
    }
    return int(Erasure.create(requested_at=NOW - timedelta(minutes=2), **values, **more).id)


def test_list_has_states_and_hmacs_and_no_keys(command: Command, ended: int, environment: dict[str, str]) -> None:
    running = add("running")
    environment["COLUMNS"] = "80"

    shown = command("erasures").stdout
    found = json.loads(command("erasures", "--json").stdout)["erasures"]

    assert [(each["id"], each["state"], each["ended_at"] is None) for each in found] == [
        (running, "running", True),
        (ended, "done", False),
    ]
    assert "5fa75fa75fa7" in shown and "ticket 12" in shown and too_wide(shown) == []
    assert "4711" not in shown and "eve@example.com" not in json.dumps(found)


@pytest.mark.parametrize("name", ["actions", "erasures"])
def test_list_continues_where_the_page_before_ended(command: Command, postgres: Database, name: str) -> None:
    for number in range(3):
        add()
        with record_action("pause", str(number), "kim"):
            pass

    first = json.loads(command(name, "--limit", "2", "--json").stdout)
    second = json.loads(command(name, "--limit", "2", "--before", first["older"], "--json").stdout)
    wrong = command(name, "--before", "x")

    ids = [each["id"] for page in (first, second) for each in page[name]]
    assert (len(first[name]), ids, second["older"]) == (2, sorted(ids, reverse=True), None) and len({*ids}) == 3
    assert wrong.returncode == 2 and f"'x' is no ID; housekeeping {name} --json has them" in wrong.stderr


def test_receipt_names_what_was_erased_what_is_kept_and_what_is_outside(
    command: Command, ended: int, environment: dict[str, str]
) -> None:
    environment["COLUMNS"] = "80"

    shown = command("receipt", str(ended)).stdout

    words = " ".join(shown.split())
    for part in (
        "done",
        "by dpo@desk",
        "reason ticket 12",
        f"started {NOW - timedelta(minutes=1):%Y-%m-%d %H:%M:%S} UTC",
        "proof nothing is left in 2 tables; kept: at least 10,000 rows of item (of orders), "
        "1 row of audit_log (security log)",
        "outside backups",
        "session deleted 1,200 -",
        "orders anonymised 2 tax law: 10 years",
        "audit_log kept 1 security log",
        "item kept at least 10,000 of orders",
    ):
        assert part in words, shown
    assert too_wide(shown) == []


def test_list_has_the_reason_of_a_refused_erasure_and_the_refusal(command: Command, postgres: Database) -> None:
    add("refused", reason="ticket 12", error="on hold: orders")

    assert "ticket 12; on hold: orders" in " ".join(command("erasures").stdout.split())


def saved_receipt(command: Command, folder: Path, erasure: int, **settings: str) -> Path:
    path = folder / "receipt.json"
    path.write_text(command("receipt", str(erasure), "--json", **settings).stdout)
    return path


def test_saved_receipt_is_verified_without_a_server(command: Command, ended: int, tmp_path: Path) -> None:
    path = saved_receipt(command, tmp_path, ended)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))  # white space is no change

    checked = command("receipt", "--verify", str(path), DATABASE_URL="postgresql://127.0.0.1:1/nowhere")

    assert (checked.returncode, checked.stdout) == (0, f"the signature of receipt {ended} is valid\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"done"', '"incomplete"'),
        ("1200", "1201"),
        ("1200", "1200.0"),
        ('"tax law: 10 years"', '"tax law: 10 years "'),
        ('"orders": 0', '"orders": 0, "more": 0'),
        ('"error": null', '"error": null, "error": null'),
        ("{", "["),
        ('"signature": "', '"signature": "0'),
        ('"signature": "', '"signature": "\\ud800'),
        ('"signature"', '"signed"'),
    ],
)
def test_changed_receipt_exits_with_1(command: Command, ended: int, tmp_path: Path, before: str, after: str) -> None:
    path = saved_receipt(command, tmp_path, ended)
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))

    checked = command("receipt", "--verify", str(path))

    assert (checked.returncode, checked.stdout) == (1, "")
    assert "receipt" in checked.stderr and len(checked.stderr.splitlines()) == 1


def test_receipt_of_a_former_secret_is_verified_while_it_is_set(command: Command, ended: int, tmp_path: Path) -> None:
    path = saved_receipt(command, tmp_path, ended)
    new = "another-secret-of-the-tests-of-erasures"

    rotated = command("receipt", "--verify", str(path), ERASURE_KEY=f"{new},{SECRET}")
    lost = command("receipt", "--verify", str(path), ERASURE_KEY=new)

    assert (rotated.returncode, lost.returncode) == (0, 1)


def test_all_receipts_of_ended_erasures_are_printed_line_by_line(command: Command, ended: int, tmp_path: Path) -> None:
    add("running")
    refused = add("refused", error="on hold")

    lines = command("erasures", "--receipts").stdout.splitlines()

    assert [json.loads(each)["id"] for each in lines] == [refused, ended]
    (tmp_path / "one.json").write_text(lines[0])
    assert command("receipt", "--verify", "one.json").returncode == 0


def test_erasure_without_a_receipt_exits_with_2(command: Command, ended: int) -> None:
    running = str(add("running"))

    unknown, early, without = command("receipt", "999"), command("receipt", running), command("receipt")

    assert [each.returncode for each in (unknown, early, without)] == [2, 2, 2]
    assert f"erasure {running} is running" in early.stderr
    assert command("receipt", str(ended), "--json", ERASURE_KEY="").returncode == 2
