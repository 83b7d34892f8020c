"""Pages delete-old-rows.md, purge-once.md and recipes.md of docs/howto, followed step by step in an empty folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Final

import pytest

from tests.acceptance.test_own_sweep_pages import Reader
from tests.acceptance.test_own_sweep_pages import reader as own_sweep_reader
from tests.acceptance.test_own_sweep_pages import warehouse as warehouse
from tests.unit.docs.blocks import ROOT, blocks

pytestmark = pytest.mark.slow

#: A purge that asks for a confirmation.
_ASKS: Final = re.compile(r"^(housekeeping purge (?!.*--(?:yes|dry-run|resume)).*)$", re.MULTILINE)
_SESSIONS: Final = (
    "CREATE TABLE sessions (id bigint PRIMARY KEY, expires_at timestamptz NOT NULL);"
    "INSERT INTO sessions SELECT n, timestamptz '2026-01-03' + (n - 10) * interval '1 day' "
    "FROM generate_series(1, 30) AS n;"
    "INSERT INTO sessions SELECT n, now() - interval '100 days' FROM generate_series(100, 103) AS n;"
    "CREATE TABLE orders (session_id bigint); INSERT INTO orders SELECT generate_series(1, 20)"
)

reader = own_sweep_reader


def read(reader: Reader, page: str) -> None:
    """Follow a page; type y where a purge asks."""
    for block in blocks(ROOT / f"docs/howto/{page}.md"):
        text = _ASKS.sub(r"echo y | \1", block.text)
        if "--resume 4711" in text:
            text = text.replace("4711", str(_interrupted(reader)))
        reader.do(block.__class__(block.page, block.line, block.kind, text, block.mark))


def _interrupted(reader: Reader) -> int:
    """Return a purge that its time limit has ended."""
    reader.rows("INSERT INTO sessions SELECT n, '2020-01-01' FROM generate_series(201, 202) AS n")
    arguments = ["purge", "sessions", "--where", "true", "--yes", "--batch-size", "1", "--max-runtime", "0.000001"]
    finished = subprocess.run(
        [sys.executable, "-m", "housekeeping", *arguments, "--json"],
        env=reader.environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    result = json.loads(finished.stdout)
    assert (result["outcome"], result["reason"]) == ("partial", "out_of_time")
    run_id: int = result["run_id"]
    return run_id


def test_page_of_five_minutes_works_as_written(reader: Reader) -> None:
    read(reader, "delete-old-rows")

    assert reader.rows("SELECT min(expires_at) > now() - interval '90 days', count(*) FROM sessions") == [(True, 180)]


def test_page_of_the_purge_works_as_written(reader: Reader) -> None:
    reader.rows(_SESSIONS)

    read(reader, "purge-once")

    assert reader.rows("SELECT count(*) FROM sessions") == [(0,)]


def test_page_of_recipes_works_as_written(reader: Reader) -> None:
    reader.rows(
        "CREATE TABLE django_session (session_key varchar(40) PRIMARY KEY, session_data text NOT NULL, "
        "expire_date timestamptz NOT NULL);"
        "INSERT INTO django_session SELECT n, '', now() + n * interval '1 day' FROM generate_series(-2, 2) AS n"
    )

    read(reader, "recipes")

    assert reader.rows("SELECT session_key FROM django_session ORDER BY 1") == [("1",), ("2",)]
