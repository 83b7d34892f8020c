"""Parts of `housekeeping.insight` that tests use."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from housekeeping.engine import alerts
from housekeeping.engine.alerts import (
    Alert,
    Observation,
    backlog,
    first_of,
    last_ended,
    oldest,
    process_alerts,
    worker_alerts,
)
from housekeeping.engine.gates import Check
from housekeeping.engine.purge import SORTED_ROWS
from housekeeping.insight import status, trends
from housekeeping.insight.backlogs import hint_of
from housekeeping.insight.causes import read_causes
from housekeeping.insight.coverage import CoveredTable, read_coverage
from housekeeping.insight.erasures import ReceiptChanged, verified
from housekeeping.insight.load import DatabaseLoad, LockWait, read_loads
from housekeeping.insight.plan import Batching, Plan, PurgePlan, dry_run, forecast_now, plan, plan_purge, with_alerts
from housekeeping.insight.status import (
    WorkerStatus,
    worker_statuses,
)
from housekeeping.insight.trends import (
    Interval,
    Progress,
    ProgressReader,
    Range,
    Rates,
    count_left,
    format_progress,
    intervals,
    pace,
    rates,
)
from housekeeping.insight.webhook import AlertWebhook, InstallationWatch, deployed
from housekeeping.insight.why import REASONS, Explanation, explain_run, why
from housekeeping.insight.wording import (
    as_json,
    format_age,
    format_counts,
    format_run_counts,
    format_value,
    next_tick,
    parse_future_time,
    parse_local_time,
    parse_past_time,
    translate_table_errors,
)
from housekeeping.ledger.processes import UNKNOWN, Processes
from housekeeping.sweeps.declaration import Sweep


def worker_status(sweep: Sweep, now: datetime, zone: Any, processes: Processes = UNKNOWN) -> WorkerStatus:
    """Return the status of one worker."""
    (found,) = worker_statuses([sweep], now, zone, processes)
    return found
