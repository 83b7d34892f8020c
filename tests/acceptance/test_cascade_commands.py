"""Commands about a sweep that deletes rows with their dependents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.acceptance.conftest import Command
from tests.integration.cascades import shop
from tests.integration.cascades.shop import ids
from tests.internals.database import Database

#: Starts many processes.
pytestmark = pytest.mark.slow

NAME = "shop.closed_accounts"


@pytest.fixture
def sweeps(postgres: Database, tmp_path: Path, environment: dict[str, str]) -> Path:
    """Module of the sweep, in which each text of a decision can stand."""
    shop.create()
    shop.fill()
    shop.execute("CREATE TABLE bill (id int PRIMARY KEY, account_id bigint REFERENCES account)")
    environment["HOUSEKEEPING_SWEEPS"] = "closing_shop"
    return tmp_path / "closing_shop.py"


def declare(sweeps: Path, dependents: str) -> None:
    sweeps.write_text(f"from tests.integration.cascades.shop import sweep\nSWEEPS = (sweep({dependents}),)\n")


def test_undecided_link_is_refused_with_exit_status_2(command: Command, sweeps: Path) -> None:
    declare(sweeps, "True")

    planned = command("plan", NAME)
    examined = command("doctor")
    ended = command("run", NAME, "--json")

    assert [planned.returncode, examined.returncode, ended.returncode] == [2, 1, 2]
    for each in (planned.stderr, examined.stdout, ended.stdout):
        assert "bill.account_id" in each
    assert json.loads(ended.stdout)["outcome"] == "failed"
    assert ids("account") == {"account": [1, 2, 3, 4]}


def test_result_has_the_numbers_of_each_table(command: Command, sweeps: Path) -> None:
    declare(sweeps, '{"bill": "keep"}')

    ended = json.loads(command("run", NAME, "--json").stdout)

    assert ended["counts"]["details"]["dependents"] == {
        "bill": {},
        "item": {"deleted": 12},
        "orders": {"deleted": 6},
        "comment": {"cleared": 3},
    }
