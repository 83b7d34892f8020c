"""``housekeeping init --sql`` prints what ``housekeeping init`` executes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from click.testing import CliRunner
from psycopg2.extensions import connection as Connection

from housekeeping import Settings
from tests.internals.cli import main
from tests.internals.database import Database
from tests.internals.embedded import find_postgres
from tests.internals.ledger import migrations
from tests.schema_description import description

#: One of a later release.
_FURTHER: Final = """
    ALTER TABLE {schema}.runs ADD COLUMN further text NOT NULL DEFAULT '100 %, or ; less';
    CREATE INDEX runs_further ON {schema}.runs (further);
    COMMENT ON COLUMN {schema}.runs.further IS 'it''s new';
"""
#: Runs ``housekeeping init`` with these options, and returns what it printed.
Init = Callable[..., str]


@pytest.fixture(params=["select", None], ids=["reserved-word", "plain-name"])
def schema_name(
    request: pytest.FixtureRequest, settings: Settings, admin: Connection, postgres: Database
) -> Iterator[str]:
    """Name of a schema that does not exist."""
    name: str = request.param or settings.schema_name
    with admin.cursor() as cursor:
        cursor.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
        yield name
        cursor.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


@pytest.fixture
def init(environment: dict[str, str], schema_name: str, monkeypatch: pytest.MonkeyPatch) -> Init:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOUSEKEEPING_SCHEMA", schema_name)

    def run(*options: str) -> str:
        done = CliRunner().invoke(main, ["init", *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def psql(script: str, settings: Settings) -> None:
    found = find_postgres()
    program = shutil.which("psql", path=str(found.path.parent)) if found else None
    if program is None:
        pytest.skip("no psql beside the PostgreSQL server")
    command = [program, "-X", "-q", "-v", "ON_ERROR_STOP=1", settings.require_database_url()]
    subprocess.run(command, input=script, text=True, check=True, timeout=60)


@pytest.mark.parametrize("behind", [0, 1], ids=["empty-database", "one-migration-behind"])
def test_printed_statements_make_what_init_makes(
    init: Init,
    behind: int,
    schema_name: str,
    settings: Settings,
    admin: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    for way in ("init", "psql"):
        with admin.cursor() as cursor, monkeypatch.context() as patch:
            cursor.execute(f'DROP SCHEMA IF EXISTS "{schema_name}" CASCADE')
            if behind:
                init()
            patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, _FURTHER))
            if way == "init":
                init()
            else:
                before = description(admin, schema_name)
                printed = init("--sql")
                assert description(admin, schema_name) == before, "it changes nothing"
                assert ("CREATE SCHEMA" in printed) == (not behind)
                psql(printed, settings)
            made.append(description(admin, schema_name))
            assert init("--sql") == f"-- schema {schema_name}: up to date\n"

    assert made[0] == made[1]
    assert len(made[0]) > 100


def test_interrupted_script_leaves_nothing_behind(
    init: Init, schema_name: str, settings: Settings, admin: Connection
) -> None:
    printed = init("--sql")
    broken = printed.replace("COMMIT;", "SELECT 1/0;\nCOMMIT;")

    with pytest.raises(subprocess.CalledProcessError):
        psql(broken, settings)

    assert description(admin, schema_name) == []


def test_json_has_each_statement(init: Init, schema_name: str) -> None:
    [printed] = json.loads(init("--sql", "--json"))["results"]

    assert (printed["kind"], printed["name"], printed["result"]) == ("schema", schema_name, "missing")
    assert printed["statements"][0] == f'CREATE SCHEMA IF NOT EXISTS "{schema_name}"'
    assert printed["statements"][-1] == f'INSERT INTO "{schema_name}".migrations (version) VALUES (1)'
