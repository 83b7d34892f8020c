"""Counts of a batch that a run adds to its own."""

from __future__ import annotations

import re

import pytest

from tests.internals.core import DeclarationError
from tests.internals.engine import added
from tests.internals.sweeps import BatchResult


def test_undeclared_count_is_rejected_with_a_message() -> None:
    said = "'moved_rows' is counted, but not among the sweep's counts (deleted_rows, batches); add it there"

    with pytest.raises(DeclarationError, match=re.escape(said)):
        added({"deleted_rows": 0, "batches": 0}, BatchResult({"moved_rows": 1}, None))
