"""Test of links between files. Sphinx only checks those within the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.docs.blocks import PAGES, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_an_existing_file(page: Path) -> None:
    targets = [link.partition("#")[0] for link in links(page) if "://" not in link]

    assert [target for target in targets if target and not (page.parent / target).exists()] == []
