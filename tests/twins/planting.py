"""How a twin plants its fault: another value or text in the place of the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from housekeeping.middleware.deduplication import scripts

Breaks = Callable[[pytest.MonkeyPatch], None]


def instead(owner: Any, name: str, broken: Any) -> Breaks:
    """Another attribute of a module or class."""
    return lambda patch: patch.setattr(owner, name, broken)


def instead_at(path: str, broken: Any) -> Breaks:
    """Another attribute, by its whole dotted path."""
    return lambda patch: patch.setattr(path, broken)


def in_text(owner: Any, name: str, right: str, wrong: str) -> Breaks:
    """Another text in a script or statement."""

    def breaks(patch: pytest.MonkeyPatch) -> None:
        text: str = getattr(owner, name)
        assert text.count(right) == 1, f"{name} has changed"
        patch.setattr(owner, name, text.replace(right, wrong))

    return breaks


def in_script(name: str, right: str, wrong: str) -> Breaks:
    """Another text in a script of deduplication."""
    return in_text(scripts, name, right, wrong)
