"""Parts of `housekeeping.web` that tests use."""

from __future__ import annotations

from housekeeping import web
from housekeeping.insight import alerts as alert_help
from housekeeping.insight.alerts import ALERTS, Headline, explained, topic, what_is_wrong
from housekeeping.insight.status import Snapshot, SnapshotReader, Unavailable, database_server
from housekeeping.web import dead_letters, security, snapshot
from housekeeping.web import dead_letters as dead_letter_changes
from housekeeping.web import workers as actions
from housekeeping.web import workers as plans
from housekeeping.web.application import are_open, create_app, group_alerts, server
from housekeeping.web.charts import FindingsCache, Plot, TrendCache, plots
from housekeeping.web.security import Attempts, Logins
from housekeeping.web.snapshot import SnapshotCache
from housekeeping.web.workers import ORDERS, WorkerTable
