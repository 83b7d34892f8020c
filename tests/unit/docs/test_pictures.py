"""Tests that the architecture diagram matches the code."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree

import redis

from housekeeping.core.settings import Settings
from housekeeping.middleware import standard_middleware
from tests.unit.docs.blocks import ROOT

PICTURE: Final = ROOT / "docs/images/tick-to-commit.svg"
_SVG: Final = "{http://www.w3.org/2000/svg}"


def _in_code() -> set[str]:
    texts = ElementTree.parse(PICTURE).getroot().iter(f"{_SVG}text")
    return {word for text in texts if text.get("class") == "code" for word in re.findall(r"\w+", text.text or "")}


def test_every_name_in_the_diagram_exists_in_the_code() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "housekeeping").rglob("*.py"))
    named = set(re.findall(r"class (\w+)", sources)) | set(re.findall(r'table_name = "(\w+)"', sources))

    assert _in_code() - named - {"BEGIN", "COMMIT"} == set()


def test_diagram_shows_the_middleware_in_order() -> None:
    order = [type(one).__name__ for one in standard_middleware(redis.Redis(), Settings())]

    [box] = [text for text in re.findall(r"RunLog.+?</g>|RunLog[^!]+?Retries", PICTURE.read_text(encoding="utf-8"))]
    shown = [word for word in re.findall(r"[A-Z]\w+", re.sub(r"<[^>]+>", " ", box)) if word in order]
    assert shown == sorted(shown, key=order.index)
    assert len(shown) == 5


def test_diagram_has_dark_mode_and_description() -> None:
    text = PICTURE.read_text(encoding="utf-8")

    assert "prefers-color-scheme: dark" in text
    assert "<title" in text and "<desc" in text
