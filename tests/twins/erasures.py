"""Faults of erasures: decisions, proof, identities and limits of time."""

from __future__ import annotations

from typing import Any, Final

from tests.internals.erasures import Erasing, graph, ledger
from tests.twins import Twin
from tests.twins.planting import instead

_ERASURE: Final = "tests/integration/erasure/"


def _nothing_left(self: Any) -> dict[str, int]:
    return {table: 0 for _, table in self.reach.tables}


TWINS: Final[list[Twin]] = [
    Twin(
        "E1",
        "erases_without_a_decision",
        _ERASURE + "test_fail_closed.py::test_all_undecided_tables_are_named_with_the_lines_to_add",
        instead(graph._Decider, "_refuse_missing", lambda self: None),
    ),
    Twin(
        "E2",
        "proves_nothing",
        _ERASURE + "test_under_fault.py::test_row_that_a_trigger_keeps_is_incomplete",
        instead(Erasing, "left", _nothing_left),
    ),
    Twin(
        "E3",
        "has_the_key_for_its_hmac",
        _ERASURE + "test_erasure.py::test_receipt_has_counts_reasons_and_the_proof_and_no_key",
        instead(ledger, "key_hmac", lambda secret, subject, key: ",".join(key)),
    ),
]
