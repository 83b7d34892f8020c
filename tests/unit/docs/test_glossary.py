"""Tests that the glossary has every table, column, state and count."""

from __future__ import annotations

import re
from typing import Any, Final, get_args

from housekeeping.sweeps.ledger.runs import Outcome
from housekeeping.workers import BUILT_IN
from housekeeping.workers.batched_git_ref_updates.models import DeletionStatus
from housekeeping.workers.bulk_imports.states import ImportStatus, SourceType, TrackerStatus
from housekeeping.workers.ci_stuck_builds.models import BuildStatus, FailureReason
from tests.unit.docs.blocks import ROOT

NAMES: Final = set(re.findall(r"`([^`]+)`", (ROOT / "docs/glossary.md").read_text(encoding="utf-8")))
#: Workers of the library's own tables, which docs/reference/ledger.md describes.
_OWN: Final = ("housekeeping.old_runs", "housekeeping.outbox")
FAMILIES: Final[list[Any]] = [family for family in BUILT_IN if family.SWEEPS[0].name not in _OWN]


def test_glossary_has_every_table_and_column() -> None:
    models = [(name, model) for family in FAMILIES for name, model in family.MODELS.items()]

    assert {name for name, _ in models} - NAMES == set()
    assert {column for _, model in models for column in model._meta.columns} - NAMES == set()


def test_glossary_has_every_state_reason_and_outcome() -> None:
    kinds: tuple[Any, ...] = (ImportStatus, TrackerStatus, SourceType, DeletionStatus, BuildStatus, FailureReason)

    assert {member.name.lower() for kind in kinds for member in kind} - NAMES == set()
    assert set(get_args(Outcome)) - NAMES == set()


def test_glossary_has_every_worker_and_count() -> None:
    sweeps = [sweep for family in BUILT_IN for sweep in family.SWEEPS]

    assert {sweep.name for sweep in sweeps if sweep.name not in _OWN} - NAMES == set()
    assert {name for sweep in sweeps for name in sweep.counts} - NAMES == set()


def test_glossary_has_every_event_of_a_state_machine() -> None:
    from docs.state_machines import MACHINES

    assert {event for machine in MACHINES.values() for event in machine.events} - NAMES == set()
