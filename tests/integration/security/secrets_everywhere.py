"""Settings whose secrets all contain one word, and a search for that word in every output."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urljoin, urlsplit

import psutil
import pytest

from tests.acceptance.processes import Process, eventually, started
from tests.installation import Installation
from tests.internals.core import PREFIX

#: Word in every secret, plain and as a URL writes it.
WORD: Final = "xylophone"
PASSWORD: Final = f"zebra@{WORD}"
IN_A_URL: Final = f"zebra%40{WORD}"
_MOST_PAGES: Final = 80

#: Commands that end without input once the servers answer.
COMMANDS: Final = (
    "list",
    "plan user_status_cleanup.batch",
    "run user_status_cleanup.batch",
    "--debug run object_storage.delete_stale_direct_uploads",
    "--debug run batched_git_ref_updates.cleanup_scheduler",
    "--debug status --json",
    "why user_status_cleanup.batch",
    "pause user_status_cleanup.batch",
    "resume --all",
    "leases list",
    "--debug leases release nobody",
    "dedup list --json",
    "deadletters list",
    "--debug deadletters show none",
    "doctor",
    "--debug init",
)
#: Commands with the longest output while a server is unavailable.
COMMANDS_AWAY: Final = (
    "--debug run user_status_cleanup.batch",
    "run object_storage.delete_stale_direct_uploads --dry-run",
    "status",
    "--debug leases list",
    "--debug deadletters list",
    "--debug doctor",
    "--debug worker",
)


def of_nowhere() -> dict[str, str]:
    """Return settings of unavailable servers."""
    return {
        "HOUSEKEEPING_DATABASE_URL": f"postgresql://me:{IN_A_URL}@127.0.0.1:1/db",
        "HOUSEKEEPING_REDIS_URL": f"redis://me:{IN_A_URL}@127.0.0.1:1/0",
        "HOUSEKEEPING_BROKER_URL": "",
        **_besides(),
    }


def of(installation: Installation) -> dict[str, str]:
    """Return settings of running servers that require the password."""
    url = installation.settings.require_database_url()
    if urlsplit(url).password or "password=" in url:
        pytest.skip("this server wants a password of its own")
    # A server that requires no password ignores one.
    database = f"{url}&password={IN_A_URL}"
    installation.client.acl_setuser(
        "me", enabled=True, reset=True, passwords=[f"+{PASSWORD}"], keys=["*"], channels=["*"], categories=["+@all"]
    )
    plain = installation.environment["HOUSEKEEPING_REDIS_URL"]
    scheme, _, rest = plain.partition("://")
    redis = f"{scheme}://me:{IN_A_URL}@{rest.rpartition('@')[2]}"
    return {"HOUSEKEEPING_DATABASE_URL": database, "HOUSEKEEPING_REDIS_URL": redis, **_besides()}


def _besides() -> dict[str, str]:
    options = {
        "aws_access_key_id": f"id-{WORD}",
        "aws_secret_access_key": f"key-{WORD}",
        "aws_region": "x",
        "aws_endpoint": "http://127.0.0.1:1",
    }
    return {
        "HOUSEKEEPING_OBJECT_STORES": json.dumps({"artifacts": {"url": "s3://bucket", "options": options}}),
        "HOUSEKEEPING_WEB_TOKEN": f"token-of-the-{WORD}",
        "HOUSEKEEPING_WEB_READ_TOKEN": f"read-token-of-the-{WORD}",
        "HOUSEKEEPING_LOG_LEVEL": "DEBUG",
    }


def command_lines(pid: int) -> list[str]:
    """Return the command lines of a process and its children, which every local user can read."""
    first = psutil.Process(pid)
    return [" ".join(each.cmdline()) for each in (first, *first.children(recursive=True))]


def pages(front: str, **headers: str) -> dict[str, str]:
    """Return every linked page by address, starting at the first one, with its headers."""
    waiting, seen = [front], dict[str, str]()
    while waiting and len(seen) < _MOST_PAGES:
        # Filters and orders of one page have many addresses, which could leave no room for the other pages.
        waiting.sort(key=lambda link: "?" not in link)
        address = waiting.pop()
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
                text = f"{answer.headers}\n{answer.read().decode()}"
        except urllib.error.HTTPError as error:
            text = error.read().decode()
        seen[address] = text
        links = {urljoin(address, link.replace("&amp;", "&")) for link in re.findall(r'(?:href|src)="([^"#]+)', text)}
        waiting += sorted(link for link in links - seen.keys() - set(waiting) if link.startswith(front))
    return seen


@contextmanager
def dashboard(environment: dict[str, str], log: Path) -> Iterator[tuple[str, Process]]:
    """Yield the address and the process of a real dashboard."""
    command = [sys.executable, "-m", "housekeeping", "web", "--port", "0"]
    with started(command, {f"{PREFIX}WEB_OPEN_TO_READ": "true", **environment}, log) as process:
        eventually(lambda: re.search(r"http://\S+/", process.text()), process)
        found = re.search(r"http://\S+/", process.text())
        assert found is not None
        yield found[0], process
