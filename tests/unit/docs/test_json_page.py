"""The page of the JSON shapes names every command that prints JSON, and no object that none of them has."""

from __future__ import annotations

import re

from docs.generators.command_pages import all_commands
from tests.internals.cli import main
from tests.unit.docs.json_page import PAGE, objects, sections


def test_every_command_that_prints_json_is_on_the_page() -> None:
    commands = all_commands(main, "housekeeping")
    printing = {words for words, command in commands if any("--json" in each.opts for each in command.params)}

    assert sections().keys() - objects() == printing


def test_every_link_of_the_page_leads_to_an_object_and_every_object_has_one() -> None:
    links = re.findall(r"\[([^\]]+)\]\(#([a-z-]+)\)", PAGE.read_text(encoding="utf-8"))

    assert {name for name, _ in links} == objects()
    assert [link for link in links if link[0].replace(" ", "-") != link[1]] == []
