"""Links lead somewhere, where the pages are read as files, too; Sphinx looks at those of the site alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.docs.blocks import PAGES, links, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    targets = [link.partition("#")[0] for link in links(page) if "://" not in link]

    assert [target for target in targets if target and not (page.parent / target).exists()] == []
