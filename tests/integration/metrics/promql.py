"""Parser for the part of PromQL that names metrics and labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tests.integration.metrics.pages import Page

_SELECTOR: Final = re.compile(r"\b((?:housekeeping|dramatiq|up)[a-z_:]*)(?:\{([^}]*)\})?")
_MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPED: Final = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_REPLACED: Final = re.compile(r'label_replace\([^"]*"(\w+)"')
#: What Prometheus adds to each scraped sample, and its own metric.
_PROMETHEUS: Final = {"instance", "job"}
_OWN: Final = {"up"}


def faults(expression: str, page: Page, recorded: dict[str, str]) -> Iterator[str]:
    """Return the metrics and labels of the expression that the page lacks.

    Parameters:
      recorded: The expressions that rules record, by the name they are recorded as.
    """
    known = set(_PROMETHEUS) | set(_REPLACED.findall(expression))
    text = re.sub(r'"[^"]*"', '""', re.sub(r"\{[^}]*\}", "", expression))
    for name, matchers in _SELECTOR.findall(expression):
        if f'"{name}' in expression and name not in text:
            continue  # part of a text
        known |= _labels(name, page, recorded)
        if name not in page.names() | set(recorded) | _OWN:
            yield f"no process exports {name}"
            continue
        for label, operator, value in _MATCHER.findall(matchers):
            yield from _unmatched(name, label, operator, value, page, recorded)
    for group in _GROUPED.findall(text):
        for label in filter(None, (each.strip() for each in group.split(","))):
            if label not in known:
                yield f"nothing in {expression!r} has the label {label}"


def _unmatched(name: str, label: str, operator: str, value: str, page: Page, recorded: dict[str, str]) -> Iterator[str]:
    if name in _OWN or label in _PROMETHEUS:
        return
    if label not in _labels(name, page, recorded):
        yield f"{name} has no label {label}"
    elif "$" not in value and name not in recorded:
        for each in value.split("|") if operator == "=~" else [value]:
            if not any(re.fullmatch(each, seen) for seen in page.values_of(name, label)):
                yield f"{name} never has {label} {each!r}"


def _labels(name: str, page: Page, recorded: dict[str, str]) -> set[str]:
    """Return a metric's labels; a recorded one has those of its expression."""
    if name in recorded:
        return {label for made_of, _ in _SELECTOR.findall(recorded[name]) for label in page.labels(made_of)}
    return page.labels(name)
