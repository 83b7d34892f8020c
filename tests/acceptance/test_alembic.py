"""Autogenerate of the real Alembic beside the library's tables (docs/howto/existing-application-sqlalchemy.md)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import psycopg2
import pytest

from housekeeping import Settings
from tests.acceptance.conftest import Command
from tests.acceptance.examples import EXAMPLES
from tests.schema_description import description
from tests.two_databases import OtherDatabase
from tests.unit.docs.blocks import ROOT, blocks

pytestmark = pytest.mark.slow

PAGE: Final = ROOT / "docs/howto/existing-application-sqlalchemy.md"
#: `{}` is the call of the page.
ENV: Final = """
from alembic import context
from sqlalchemy import Column, Integer, MetaData, Table, create_engine

target_metadata = MetaData()
Table("reminders", target_metadata, Column("id", Integer, primary_key=True), Column("n", Integer))
with create_engine(context.config.get_main_option("sqlalchemy.url")).connect() as connection:
    {}
    with context.begin_transaction():
        context.run_migrations()
"""

#: Followed by the functions of the page.
REVISION: Final = """
from alembic import op

revision = "1"
down_revision = None

"""

#: Runs ``alembic`` with these arguments.
Alembic = Callable[..., subprocess.CompletedProcess[str]]


#: A table of the application, and archives in three places.
TABLES: Final = """
CREATE TABLE reminders (id serial PRIMARY KEY, n integer);
CREATE TABLE old_reminders (LIKE reminders, archived_at timestamptz, archived_by_run bigint);
CREATE SCHEMA archive;
CREATE TABLE archive.reminders (LIKE old_reminders);
CREATE TABLE archive.months (LIKE old_reminders) PARTITION BY RANGE (archived_at);
CREATE TABLE archive.months_1 PARTITION OF archive.months DEFAULT;
"""


@pytest.fixture
def url(other_database: OtherDatabase, command: Command, settings: Settings) -> Iterator[str]:
    """Database with the library's tables beside those of `TABLES`."""
    command("init", DATABASE_URL=other_database.url)
    with psycopg2.connect(other_database.url) as connection, connection.cursor() as cursor:
        cursor.execute(TABLES)
    yield other_database.url
    with connection, connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS reminders, old_reminders, forgotten, alembic_version CASCADE")
        cursor.execute(f"DROP SCHEMA IF EXISTS archive, {settings.schema_name} CASCADE")
    connection.close()


@pytest.fixture
def alembic(url: str, environment: dict[str, str], tmp_path: Path) -> Alembic:
    """Project of Alembic whose ``env.py`` has the call of the page, unless another is given."""
    [shown] = [block.text for block in blocks(PAGE) if "context.configure" in block.text]
    [revision] = [block.text for block in blocks(PAGE) if "op.upgrade_housekeeping" in block.text]
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "1.py").write_text(REVISION + revision)
    (tmp_path / "script.py.mako").write_text("")
    ini = f"[alembic]\nscript_location = {tmp_path}\nsqlalchemy.url = {url.replace('%', '%%')}\npath_separator = os\n"
    (tmp_path / "alembic.ini").write_text(ini)

    def run(*arguments: str, configure: str = shown) -> subprocess.CompletedProcess[str]:
        (tmp_path / "env.py").write_text(ENV.format(configure.strip().replace("\n", "\n    ")))
        return subprocess.run(
            [sys.executable, "-m", "alembic", *arguments],
            env=environment | {"PYTHONPATH": str(EXAMPLES)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def test_autogenerate_with_the_pages_functions_finds_nothing(alembic: Alembic) -> None:
    alembic("stamp", "head")

    checked = alembic("check")

    assert (checked.returncode, "No new upgrade operations detected" in checked.stdout) == (0, True), checked.stderr


def test_autogenerate_without_them_would_drop_the_library(alembic: Alembic) -> None:
    plain = "context.configure(connection=connection, target_metadata=target_metadata, include_schemas=True)"

    alembic("stamp", "head")
    checked = alembic("check", configure=plain)

    found = checked.stdout + checked.stderr
    assert checked.returncode != 0
    removed = set(re.findall(r"\('remove_table', Table\('(\w+)'", found))
    assert removed >= {"runs", "leases", "old_reminders", "reminders", "months"}, found


def test_autogenerate_still_finds_the_applications_own_changes(alembic: Alembic, url: str) -> None:
    with psycopg2.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE forgotten (id integer); ALTER TABLE reminders DROP n")
    connection.close()

    alembic("stamp", "head")
    checked = alembic("check")

    found = checked.stdout + checked.stderr
    assert re.findall(r"\('(\w+_\w+)', .*?'(\w+)'", found) == [
        ("remove_table", "forgotten"),
        ("add_column", "reminders"),
    ]


@pytest.mark.parametrize("way", ["new", "after init", "offline"])
def test_revision_creates_what_init_creates(
    alembic: Alembic, url: str, settings: Settings, environment: dict[str, str], way: str
) -> None:
    environment["HOUSEKEEPING_SCHEMA"] = settings.schema_name
    with closing(psycopg2.connect(url)) as admin:
        admin.autocommit = True
        expected = description(admin, settings.schema_name)
        with admin.cursor() as cursor:
            if way != "after init":
                cursor.execute(f"DROP SCHEMA {settings.schema_name} CASCADE")
            done = alembic("upgrade", "head", *(["--sql"] if way == "offline" else []))
            assert done.returncode == 0, done.stderr
            if way == "offline":
                assert description(admin, settings.schema_name) == []
                cursor.execute(done.stdout)

        assert description(admin, settings.schema_name) == expected


def test_revision_for_a_version_of_a_later_release_is_rejected(alembic: Alembic, tmp_path: Path) -> None:
    revision = tmp_path / "versions" / "1.py"
    revision.write_text(revision.read_text().replace("to=1)", "to=99)"))

    refused = alembic("upgrade", "head")

    assert "there is no version 99 since 1; this release has the versions 1 to 1" in refused.stderr
