"""README.md and the pages of docs/ that begin with a purge or a recipe, followed step by step in an empty folder."""

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
#: Accounts 1 to 3 are closed, and the third has a purchase; the person 4711 has a session and a purchase.
_ACCOUNTS: Final = (
    "CREATE TABLE account (id bigint PRIMARY KEY, closed_at timestamptz);"
    "CREATE TABLE sessions (id bigint PRIMARY KEY, account_id bigint NOT NULL REFERENCES account ON DELETE CASCADE, "
    "expires_at timestamptz NOT NULL);"
    "CREATE TABLE purchase (id bigint PRIMARY KEY, account_id bigint REFERENCES account);"
    "CREATE INDEX ON sessions (account_id); CREATE INDEX ON sessions (expires_at, id);"
    "CREATE INDEX ON purchase (account_id);"
    "INSERT INTO account SELECT n, now() - interval '2 years' FROM generate_series(1, 3) AS n;"
    "INSERT INTO account VALUES (4, NULL), (5, NULL), (4711, NULL);"
    "INSERT INTO purchase VALUES (1, 3), (2, 4711);"
    "INSERT INTO sessions SELECT n, n, now() + interval '1 day' FROM generate_series(1, 5) AS n;"
    "INSERT INTO sessions VALUES (11, 4, now() - interval '100 days'), (12, 4, now() - interval '1 day'), "
    "(13, 4711, now() + interval '1 day')"
)

reader = own_sweep_reader


@pytest.fixture
def postgres_reader(reader: Reader) -> Reader:
    """Reader with accounts and without Redis."""
    del reader.environment["HOUSEKEEPING_REDIS_URL"], reader.environment["HOUSEKEEPING_BROKER_URL"]
    reader.rows(_ACCOUNTS)
    return reader


def read(reader: Reader, page: str) -> None:
    """Follow a page; type y where a purge asks."""
    for block in blocks(ROOT / page):
        if block.mark.startswith("<!-- command"):  # .ci/run runs it
            continue
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


def test_readme_works_as_written_with_postgresql_alone(postgres_reader: Reader) -> None:
    read(postgres_reader, "README.md")

    assert postgres_reader.rows("SELECT array_agg(id ORDER BY id) FROM account") == [([3, 4, 5],)]
    assert postgres_reader.rows("SELECT array_agg(id ORDER BY id) FROM sessions") == [([3, 4, 5],)]
    assert postgres_reader.rows("SELECT id, account_id FROM purchase ORDER BY 1") == [(1, 3), (2, None)]


def test_page_of_six_situations_works_as_written(postgres_reader: Reader) -> None:
    read(postgres_reader, "docs/which-part.md")

    # Only its purge changes rows; the cascade and the erasure are dry runs.
    assert postgres_reader.rows("SELECT array_agg(id ORDER BY id) FROM sessions") == [([1, 2, 3, 4, 5, 12, 13],)]
    assert postgres_reader.rows("SELECT count(*) FROM account") == [(6,)]


def test_page_of_five_minutes_works_as_written(reader: Reader) -> None:
    read(reader, "docs/howto/delete-old-rows.md")

    assert reader.rows("SELECT min(expires_at) > now() - interval '90 days', count(*) FROM sessions") == [(True, 180)]


def test_page_of_the_purge_works_as_written(reader: Reader) -> None:
    reader.rows(_SESSIONS)

    read(reader, "docs/howto/purge-once.md")

    assert reader.rows("SELECT count(*) FROM sessions") == [(0,)]


def test_page_of_recipes_works_as_written(reader: Reader) -> None:
    reader.rows(
        "CREATE TABLE django_session (session_key varchar(40) PRIMARY KEY, session_data text NOT NULL, "
        "expire_date timestamptz NOT NULL);"
        "INSERT INTO django_session SELECT n, '', now() + n * interval '1 day' FROM generate_series(-2, 2) AS n"
    )

    read(reader, "docs/howto/recipes.md")

    assert reader.rows("SELECT session_key FROM django_session ORDER BY 1") == [("1",), ("2",)]
