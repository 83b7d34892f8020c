"""The page docs/howto/remove.md, followed on an installation that has used everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.pages import Reader
from tests.installation import Installation
from tests.installation import installation as installation
from tests.installation import redis_of_installations as redis_of_installations
from tests.unit.docs.blocks import ROOT, blocks

pytestmark = pytest.mark.slow

PAGE: Final = ROOT / "docs/howto/remove.md"
PURGE: Final = ["purge", "user_statuses", "--yes", "--where", "user_id < 3", "--archive-to", "old_sessions"]


def tables(installation: Installation, schema: str) -> dict[str, int]:
    """Return the number of rows of each table of the schema."""
    with installation.admin.cursor() as cursor:
        cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s ORDER BY 1", (schema,))
        found = {}
        for (name,) in cursor.fetchall():
            cursor.execute(f'SELECT count(*) FROM "{schema}"."{name}"')
            found[name] = cursor.fetchone()[0]
        return found


def test_page_removes_everything_but_the_applications_own(installation: Installation, tmp_path: Path) -> None:
    application = installation.settings.namespace
    with installation.admin.cursor() as cursor:
        cursor.execute(
            f"CREATE TABLE {application}.old_sessions (LIKE {application}.user_statuses, "
            "archived_at timestamptz NOT NULL, archived_by_run bigint NOT NULL)"
        )
        cursor.execute(
            f"CREATE TABLE {application}.page_view_2023 (viewed_at timestamptz); "
            f"INSERT INTO {installation.settings.schema_name}.detached_partitions "
            f"SELECT '{application}.page_view_2023'::regclass::oid, 'page_view_2023', 'shop.old', 'page_view', ''"
        )
    assert installation.command(*PURGE).returncode == 0
    installation.command("pause", "ci.stuck_jobs")
    assert installation.command("enqueue", "user_status_cleanup.batch").returncode == 0
    run = installation.command("run", "object_storage.delete_stale_direct_uploads", "--json")
    assert json.loads(run.stdout)["outcome"] == "done" or run.returncode == 1, run.stderr
    before, uploads = tables(installation, application), installation.client.hgetall("pending_direct_uploads")

    with Reader(installation, tmp_path / "reader") as reader:
        reader.rows(f"SET search_path TO {application}")
        for block in blocks(PAGE):  # the output is compared with the page's
            reader.do(block)

    assert tables(installation, installation.settings.schema_name) == {}
    left = tables(installation, application)
    assert (before["old_sessions"], left) == (2, before)
    assert uploads and installation.client.hgetall("pending_direct_uploads") == uploads
    assert list(installation.client.scan_iter()) == [b"pending_direct_uploads"]
    again = installation.command("status")
    assert (again.returncode, "housekeeping init" in again.stderr) == (2, True)
