"""Page docs/howto/pgbouncer.md, followed as written, on a pooler of its own."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.conftest import Urls
from tests.installation import Installation
from tests.installation import installation as installation
from tests.installation import redis_of_installations as redis_of_installations
from tests.pgbouncer_server import PgBouncer, pgbouncer
from tests.unit.docs.blocks import ROOT, blocks

PAGE: Final = ROOT / "docs/howto/pgbouncer.md"
STATUSES: Final = "user_status_cleanup.batch"


@pytest.mark.slow
def test_page_leads_through_a_fresh_pooler(installation: Installation, urls: Urls) -> None:
    [commands] = (block.text for block in blocks(PAGE) if block.kind == "sh")
    [shown] = (block.text for block in blocks(PAGE) if block.kind == "text")
    [(name, address)] = re.findall(r"^export HOUSEKEEPING_(\w+)=(\S+)$", commands, re.MULTILINE)
    with pgbouncer(urls.database) as fresh:
        settings = {name: _instead(address, fresh, installation)}

        doctor = installation.command(*commands.splitlines()[-1].split()[1:], **settings)
        ran = installation.command("run", STATUSES, **settings)
        unprepared = installation.command("run", STATUSES, **settings, PREPARED_STATEMENTS="off")
        refused = installation.command("run", STATUSES, **settings, PREPARED_STATEMENTS="on")

    assert shown.split() in [line.split() for line in doctor.stdout.splitlines()], doctor.stdout
    assert (ran.returncode, unprepared.returncode) == (0, 0), ran.stderr + unprepared.stderr
    assert "unsupported startup parameter" in refused.stderr


def _instead(address: str, pooler: PgBouncer, installation: Installation) -> str:
    """Return the page's URL with the pooler of the test, its user and database, and the schema of the installation."""
    options = installation.settings.require_database_url().partition("options=")[2]
    assert address == "postgresql://app@pgbouncer:6432/app"
    return f"{pooler.url}?options={options}"
