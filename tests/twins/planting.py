"""Functions that plant the fault of a twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.internals.middleware import enqueue, keys

Breaks = Callable[[pytest.MonkeyPatch], None]


def instead(owner: Any, name: str, broken: Any) -> Breaks:
    """Replace an attribute of a module or class."""
    return lambda patch: patch.setattr(owner, name, broken)


def in_text(owner: Any, name: str, right: str, wrong: str) -> Breaks:
    """Replace a text in a script or statement."""

    def breaks(patch: pytest.MonkeyPatch) -> None:
        text: str = getattr(owner, name)
        assert text.count(right) == 1, f"{name} has changed"
        patch.setattr(owner, name, text.replace(right, wrong))

    return breaks


def in_script(name: str, right: str, wrong: str) -> Breaks:
    """Replace a text in a script of deduplication or of enqueueing."""
    return in_text(keys if hasattr(keys, name) else enqueue, name, right, wrong)
