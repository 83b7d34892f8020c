"""Command that writes docs/explanation/state-machines.md: ``python docs/state_machines.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from housekeeping.database.state_machines import StateMachine
from housekeeping.workers.batched_git_ref_updates import models as git_refs
from housekeeping.workers.bulk_imports.models import BulkImport, BulkImportEntity, BulkImportTracker
from housekeeping.workers.ci_stuck_builds import models as builds

PAGE: Final = Path(__file__).parent / "explanation" / "state-machines.md"
MACHINES: Final[dict[str, StateMachine]] = {
    "bulk_imports": BulkImport.machine,
    "bulk_import_entities": BulkImportEntity.machine,
    "bulk_import_trackers": BulkImportTracker.machine,
    "ci_builds": builds.machine,
    "batched_git_ref_updates_deletions": git_refs.machine,
}
_HEAD: Final = """# State machines

One machine serves a table: single records (`build.drop(reason)`, `entity.cleanup_stale()`) and the sweeps read the same
allowed sources and target from it. Whether a row really moves is decided by the statement that moves it
(`UPDATE … WHERE status IN (…)`), so two at once cannot both win. An event that a record's state does not allow raises
`IllegalEvent`, which names record, state and event, and changes nothing.

This page is made from the code by `python docs/state_machines.py`.
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for table, machine in MACHINES.items():
        rows = [
            f"| `{event}` | {', '.join(map(machine.state_name, machine.sources(event)))} | "
            f"{machine.state_name(machine.target(event))} |"
            for event in machine.events
        ]
        diagram = machine.diagram().strip()
        parts.append(
            f"## {table}\n\n| Event | From | To |\n|---|---|---|\n"
            + "\n".join(rows)
            + f"\n\n```mermaid\n{diagram}\n```\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
