"""Faults of the log of actions (promise O1)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

from housekeeping.sweeps.ledger import action_log
from housekeeping.sweeps.ledger.action_log import Outcome
from housekeeping.web.pages import actions
from tests.twins import Twin
from tests.twins.planting import instead, instead_at

_LOG: Final = "tests/integration/sweeps/ledger/test_action_log.py::"
_COMMANDS: Final = "tests/acceptance/test_action_log_commands.py::"
_DASHBOARD: Final = "tests/integration/web/test_action_log.py::"

TWINS: Final = (
    Twin(
        "O1",
        "logs_no_action",
        f"{_LOG}test_action_is_logged_with_user_target_and_result",
        instead(action_log, "_in_main", lambda write: (None, None)),
    ),
    Twin(
        "O1",
        "pauses_a_worker_without_logging_it",
        f"{_DASHBOARD}test_every_change_on_the_dashboard_is_logged",
        instead(actions, "record_action", lambda *given: nullcontext(Outcome())),
    ),
    Twin(
        "O1",
        "purges_without_logging_it",
        f"{_COMMANDS}test_every_changing_command_is_logged",
        instead_at("housekeeping.cli.commands.purge.record_action", lambda *given: nullcontext(Outcome())),
        in_processes=True,
        slow=True,
    ),
)
