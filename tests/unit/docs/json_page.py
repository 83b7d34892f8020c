"""The page of the JSON shapes as a schema: what each command prints, and of which objects that consists."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from tests.unit.docs.blocks import ROOT

PAGE: Final = ROOT / "docs/reference/json.md"
_ROW: Final = re.compile(r"^\| `(?P<key>\w+)` \| (?P<kind>.+?) \|", re.MULTILINE)
_LINK: Final = re.compile(r"\[(?P<name>[\w ]+)\]\(#[\w-]+\)")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00")
_SAME: Final = re.compile(r"The same as `(?P<name>[\w ]+)`\.")
_WHOLE: Final = re.compile(r"The object is an? \[(?P<name>[\w ]+)\]\(#[\w-]+\)")
_MORE: Final = re.compile(r"All keys of an? \[(?P<name>[\w ]+)\]\(#[\w-]+\), and:")

#: Key -> its kind.
Shape = dict[str, str]


@cache
def sections() -> dict[str, str]:
    """Return the text below each heading: of commands by their words, of objects by their names."""
    parts = re.split(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip((name.strip("`") for name in parts[1::2]), parts[2::2], strict=True))


def shape(name: str, variant: int = 0) -> Shape:
    """Return the keys of a command's object, or of an object.

    Parameters:
      variant: Which of the command's forms.
    """
    text = sections()[name]
    for pattern in (_SAME, _WHOLE):
        if found := pattern.search(text):
            return shape(found["name"])
    tables = [{row["key"]: row["kind"] for row in _ROW.finditer(each)} for each in text.split("\n\n")]
    own = [each for each in tables if each][variant]
    more = _MORE.search(text)
    return own if more is None else {**shape(more["name"]), **own}


def faults(value: Any, expected: Shape, seen: set[str], place: str = "") -> list[str]:
    """Return where a value differs from its shape, and add the names of its objects to `seen`."""
    if not isinstance(value, dict):
        return [f"{place}: {value!r} is no object"]
    missing = [f"{place}.{key}: missing" for key in expected.keys() - value.keys()]
    unknown = [f"{place}.{key}: not on the page" for key in value.keys() - expected.keys()]
    known = (_of(value[key], kind, seen, f"{place}.{key}") for key, kind in expected.items() if key in value)
    return [*missing, *unknown, *(fault for found in known for fault in found)]


def _of(value: Any, kind: str, seen: set[str], place: str) -> list[str]:
    if kind.endswith(" or null"):
        return [] if value is None else _of(value, kind.removesuffix(" or null"), seen, place)
    many, of, each_kind = kind.partition(" of ")
    if of:
        if not isinstance(value, list if many == "list" else dict):
            return [f"{place}: {value!r} is no {many}"]
        parts = enumerate(value) if isinstance(value, list) else value.items()
        return [fault for at, each in parts for fault in _of(each, each_kind, seen, f"{place}[{at}]")]
    if link := _LINK.fullmatch(kind):
        seen.add(link["name"])
        return faults(value, shape(link["name"]), seen, place)
    return [] if _is(value, kind) else [f"{place}: {value!r} is no {kind}"]


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "any":
            return True
        case "text":
            return isinstance(value, str)
        case "time":
            return isinstance(value, str) and _TIME.fullmatch(value) is not None
        case "true or false":
            return isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "whole number":
            return isinstance(value, int) and not isinstance(value, bool)
    raise AssertionError(f"{kind!r} is no kind of value")


def objects() -> set[str]:
    """Return the names of the objects."""
    return {name for name in sections() if not name.startswith("housekeeping ")}
