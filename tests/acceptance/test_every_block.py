"""Code blocks of docs/ that no other test runs, page by page from top to bottom."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from psycopg2 import sql

from tests.acceptance.pages import Reader
from tests.installation import Installation
from tests.installation import installation as installation
from tests.installation import redis_of_installations as redis_of_installations
from tests.internals.core import PREFIX
from tests.internals.ledger import Run
from tests.unit.docs.blocks import PAGES, RUN, Block, blocks, name_of, run_elsewhere

#: A page for each question of a person on call, about an installation with last night's runs.
ON_CALL: Final = (
    "what-runs-when",
    "last-nights-run",
    "what-would-it-do",
    "why-did-it-not-run",
    "stop-it",
    "what-is-slow",
    "alerts",
    "dashboard",
)


def _own(page: Path) -> list[Block]:
    return [
        block
        for block in blocks(page)
        # Tests of their own run the files of docs/examples as applications.
        if block.kind in (*RUN, "text") and not block.mark.startswith(("<!-- command", "<!-- file"))
    ]


def _cases() -> list[Any]:
    found = []
    for page in PAGES:
        kinds = {block.kind for block in _own(page)} & set(RUN)
        if kinds and run_elsewhere(name_of(page)) is None:
            marks = [pytest.mark.slow] if kinds & {"sh", "python"} else []
            found.append(pytest.param(page, id=name_of(page), marks=marks))
    return found


def _last(hour: int) -> datetime:
    now = datetime.now(UTC)
    at = now.replace(hour=hour, minute=0, second=0, microsecond=0)
    return at if at <= now else at - timedelta(days=1)


def _ran(worker: str, tick: datetime, outcome: str, seconds: float, reason: str | None = None, **counts: int) -> None:
    ended = tick + timedelta(seconds=seconds)
    times = {"tick": tick, "started_at": tick, "heartbeat_at": ended, "finished_at": ended}
    Run.insert(worker=worker, trigger="schedule", outcome=outcome, reason=reason, counts=counts, **times).execute()


def _add_last_nights_runs() -> None:
    """Add runs to the ledger, one of which took long."""
    _ran("bulk_imports.stale_import", _last(4), "lost", 20, "taken_over", timed_out_imports=100, batches=1)
    _ran("bulk_imports.stale_import", _last(4), "done", 2, timed_out_imports=20, timed_out_entities=90, batches=2)
    _ran("object_storage.delete_stale_direct_uploads", _last(3), "skipped", 0, "lease_held")
    _ran("user_status_cleanup.batch", _last(0), "done", 70, deleted_rows=9000, batches=90)


@pytest.mark.parametrize("page", _cases())
def test_every_block_of_a_page_has_the_described_effect(installation: Installation, tmp_path: Path, page: Path) -> None:
    own, is_on_call = _own(page), page.stem in ON_CALL
    if any("curl" in block.text for block in own) and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    if is_on_call:
        _add_last_nights_runs()
        installation.environment[f"{PREFIX}WEB_TOKEN"] = "a-token-of-the-tests"
    namespace = sql.Identifier(installation.settings.namespace)
    with installation.admin.cursor() as cursor, Reader(installation, tmp_path / "reader") as reader:
        # Each page starts with the same tables; a page's own changes are rolled back.
        cursor.execute(sql.SQL("BEGIN; SET LOCAL search_path TO {}").format(namespace))
        try:
            for block in own:
                rows = reader.do(block)
                assert rows or not is_on_call or block.kind != "sql", block.place
        finally:
            cursor.execute("ROLLBACK")
