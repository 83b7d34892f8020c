"""Contrast and colors of the dashboard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.internals.web import web

CSS: Final = (Path(str(web.__file__)).parent / "static/style.css").read_text(encoding="utf-8")
LIGHT, DARK = re.findall(r":root \{(.*?)\}", CSS, flags=re.DOTALL)
LEAST: Final = 4.5  # WCAG 2, AA, for text of any size
LEAST_OF_BORDERS: Final = 3.0  # the same, for the borders of fields

#: Every text color with each of its backgrounds.
TEXTS: Final = [
    *((text, ground) for text in ("ink", "faint", "good", "bad", "warn", "link") for ground in ("paper", "raised")),
    ("ink", "alert"),
    ("bad", "alert"),
    ("paper", "link"),
    ("paper", "bad"),
]


def colors(block: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): #([0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_computed_as_defined() -> None:
    assert contrast("000000", "ffffff") == pytest.approx(21)
    assert contrast("767676", "ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), TEXTS)
def test_text_contrast_is_sufficient_on_every_background(scheme: str, text: str, ground: str) -> None:
    known = colors(scheme)

    assert contrast(known[text], known[ground]) >= LEAST


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_fields_and_focus_have_sufficient_contrast(scheme: str) -> None:
    known = colors(scheme)

    assert min(contrast(known[line], known["paper"]) for line in ("faint", "link")) >= LEAST_OF_BORDERS


def test_both_color_schemes_define_the_same_colors() -> None:
    rules = CSS.replace(LIGHT, "").replace(DARK, "")

    assert colors(LIGHT).keys() == colors(DARK).keys()
    assert re.findall(r"#[0-9a-f]{3,8}\b|rgba?\(", rules) == []


def test_pages_have_no_animations() -> None:
    assert re.findall(r"transition|animation|scroll-behavior", CSS) == []
