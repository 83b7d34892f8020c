"""Pages of the documentation with their code blocks, inline code and links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

from docs.generators.example_blocks import path_of

ROOT: Final = Path(__file__).parents[3]
PAGES: Final = sorted(
    [*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
)

#: Kinds of blocks that a reader runs.
RUN: Final = ("sh", "python", "sql", "json")
#: Kinds of blocks that a test in `test_blocks` parses.
READ: Final = ("ini", "yaml")
#: Kinds of blocks that are only shown.
SHOWN: Final = ("text", "mermaid")

#: Pages whose blocks another test runs.
ELSEWHERE: Final[dict[str, str]] = {
    "docs/howto/archive-and-restore.md": "tests/acceptance/test_own_sweep_pages.py",
    "docs/howto/own-sweep-django.md": "tests/acceptance/test_django_project.py",
    "docs/howto/own-sweep*.md": "tests/acceptance/test_own_sweep_pages.py",
    "docs/howto/delete-times-out.md": "tests/acceptance/test_own_sweep_pages.py",
    "docs/howto/no-table-is-forgotten.md": "tests/acceptance/test_coverage_page.py",
    **dict.fromkeys(
        (f"docs/howto/{name}.md" for name in ("erase-a-person", "offboard-a-tenant", "right-of-access")),
        "tests/acceptance/test_erasure_pages.py",
    ),
    "docs/howto/failover.md": "tests/acceptance/test_failover.py",
    "docs/howto/mount-the-page.md": "tests/acceptance/test_mounted_page.py",
    **dict.fromkeys(
        (f"docs/howto/{name}.md" for name in ("arq", "celery", "fastapi")),
        "tests/acceptance/test_task_queue_pages.py",
    ),
    "docs/howto/legal-hold.md": "tests/acceptance/test_own_sweep_pages.py",
    "docs/howto/drop-partitions.md": "tests/acceptance/test_own_sweep_pages.py",
    "docs/howto/delete-old-rows.md": "tests/acceptance/test_purge_pages.py",
    "docs/howto/pgbouncer.md": "tests/acceptance/test_pgbouncer_page.py",
    "docs/howto/purge-once.md": "tests/acceptance/test_purge_pages.py",
    "docs/howto/recipes.md": "tests/acceptance/test_purge_pages.py",
    "docs/howto/rabbitmq.md": "tests/acceptance/test_rabbitmq_page.py",
    "docs/howto/redis-sentinel.md": "tests/acceptance/test_redis_sentinel_page.py",
    "docs/howto/remove.md": "tests/acceptance/test_remove_page.py",
    "docs/howto/slow-down.md": "tests/acceptance/test_own_sweep_pages.py",
    "docs/howto/several-databases.md": "tests/acceptance/test_several_databases.py",
    "docs/howto/testing.md": "tests/integration/testing/test_page.py",
    "docs/howto/webhook.md": "tests/integration/metrics/test_webhook.py",
    **dict.fromkeys(("README.md", "docs/which-part.md"), "tests/acceptance/test_purge_pages.py"),
    # Takes minutes. `test_commands` checks its options.
    "docs/explanation/simulator.md": "tests/unit/docs/test_commands.py",
    # `test_commands` compares its commands with .ci/run.
    "CONTRIBUTING.md": "tests/unit/docs/test_commands.py",
}

_markdown: Final = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """Code block of a page.

    Attributes:
      page: Its path from the top folder.
      line: Where it begins, from 1.
      mark: The comment that stands before it; nothing where there is none.
    """

    page: str
    line: int
    kind: str
    text: str
    mark: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def _tokens(page: Path) -> list[Token]:
    return _markdown.parse(page.read_text(encoding="utf-8"))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page without Sphinx's directives."""
    found = []
    mark = ""
    for token in _tokens(page):
        if token.type == "fence" and not token.info.startswith("{"):
            assert token.map is not None
            found.append(Block(name_of(page), token.map[0] + 1, token.info.strip(), token.content, mark))
        mark = token.content.strip() if token.type == "html_block" else ""
    return found


def included(page: Path) -> list[Path]:
    """Return the files that a page shows."""
    return [path for block in blocks(page) if (path := path_of(block.mark)) is not None]


def words_in_code(page: Path) -> Iterator[str]:
    """Yield the inline code of a page."""
    for token in _tokens(page):
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def links(page: Path) -> Iterator[str]:
    """Yield the targets of links and pictures."""
    for token in _tokens(page):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target:
                yield str(target)


def run_elsewhere(page: str) -> str | None:
    """Return the test that runs a page's blocks. None for `tests/acceptance/test_every_block.py`."""
    return next((test for pattern, test in ELSEWHERE.items() if fnmatch(page, pattern)), None)
