"""Parts of `housekeeping.web` that tests use."""

from __future__ import annotations

from housekeeping import web
from housekeeping.insight.status import Snapshot, SnapshotReader, Unavailable, database_server
from housekeeping.web import alerts as alert_help
from housekeeping.web import dead_letters, security
from housekeeping.web import dead_letters as dead_letter_changes
from housekeeping.web import workers as actions
from housekeeping.web import workers as plans
from housekeeping.web.alerts import ALERTS, are_open, group_alerts, topic
from housekeeping.web.application import create_app, server
from housekeeping.web.charts import Plot, TrendCache, plots
from housekeeping.web.security import Logins
from housekeeping.web.snapshot import SnapshotCache
from housekeeping.web.workers import ORDERS, WorkerTable
