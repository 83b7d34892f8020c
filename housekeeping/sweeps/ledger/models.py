"""Models of the library's own tables. `schema` creates the tables."""

from __future__ import annotations

from typing import Final

from peewee import (
    SQL,
    BigAutoField,
    BigIntegerField,
    BooleanField,
    CompositeKey,
    DoubleField,
    IntegerField,
    JSONField,
    TextField,
)

from housekeeping.database.connection import BaseModel
from housekeeping.database.times import UtcDateTimeField
from housekeeping.leases.fencing import Lease as Lease

#: The database's clock, because several machines write and compare these times.
NOW: Final = SQL("clock_timestamp()")


class Run(BaseModel):
    """One attempt at a run; `outcome` is NULL while it is running.

    Attributes:
      host, pid: The process that runs it, or that recorded it; NULL in rows of earlier releases.
      traceback: Traceback of the error that ended it, see `run_end.stored_traceback`.
      rejected: The records that it rejected, see `rejections.stored_groups`.
    """

    id = BigAutoField()
    worker = TextField()
    message_id = TextField(null=True)
    tick = UtcDateTimeField(null=True)
    trigger = TextField()
    epoch = BigIntegerField(null=True)
    started_at = UtcDateTimeField()
    heartbeat_at = UtcDateTimeField()
    finished_at = UtcDateTimeField(null=True)
    outcome = TextField(null=True)
    reason = TextField(null=True)
    counts = JSONField(default=dict)
    cursor = JSONField(null=True)
    error = TextField(null=True)
    backlog = BigIntegerField(null=True)
    backlog_exact = BooleanField(null=True)
    host = TextField(null=True)
    pid = IntegerField(null=True)
    traceback = TextField(null=True)
    rejected = JSONField(null=True)

    class Meta:
        table_name = "runs"
        schema = "housekeeping"


class _OverrideRow(BaseModel):
    """Columns of an operator's override: its state, why, until when and by whom."""

    state = TextField()
    reason = TextField(null=True)
    until = UtcDateTimeField(null=True)
    said_by = TextField(null=True)
    batch_size = IntegerField(null=True)
    max_runtime_s = DoubleField(null=True)


class Switch(_OverrideRow):
    """Current override of a worker: paused, or with lower limits."""

    worker = TextField(primary_key=True)
    since = UtcDateTimeField()

    class Meta:
        table_name = "switches"
        schema = "housekeeping"


class SwitchChange(_OverrideRow):
    """One change of a worker's override; `state` is ``on`` when the override ended."""

    id = BigAutoField()
    worker = TextField()
    at = UtcDateTimeField()

    class Meta:
        table_name = "switch_changes"
        schema = "housekeeping"


class Rejection(BaseModel):
    """Records that a worker's last run rejected for one cause.

    Attributes:
      subject: The run's argument as text; empty for a worker without one.
      rows: The number of rejected records.
      times: Runs in a row that rejected every record; 0 if the last one processed some.
      not_before: Earliest time to schedule a run for the subject again; None for any time.
      position: Where the last run ended, like the ledger's cursor.
    """

    worker = TextField()
    subject = TextField()
    cause = TextField()
    since = UtcDateTimeField()
    last_at = UtcDateTimeField()
    rows = BigIntegerField()
    times = IntegerField()
    not_before = UtcDateTimeField(null=True)
    position = JSONField(null=True)
    sample = JSONField()

    class Meta:
        table_name = "rejections"
        schema = "housekeeping"
        primary_key = CompositeKey("worker", "subject", "cause")


class RejectionReport(BaseModel):
    """Time at which a cause of a worker's rejections was last sent to the error tracker."""

    worker = TextField()
    cause = TextField()
    reported_at = UtcDateTimeField()

    class Meta:
        table_name = "rejection_reports"
        schema = "housekeeping"
        primary_key = CompositeKey("worker", "cause")


class OutboxRow(BaseModel):
    """One row of an event, waiting for its handler; deleted once the handler has taken it."""

    id = BigAutoField()
    event = TextField()
    subscription = TextField()
    worker = TextField()
    run_id = BigIntegerField(null=True)
    contents = JSONField()
    attempts = IntegerField(default=0)
    created_at = UtcDateTimeField()
    due_at = UtcDateTimeField()
    error = TextField(null=True)

    class Meta:
        table_name = "outbox"
        schema = "housekeeping"


class ProcessRow(BaseModel):
    """The last heartbeat of a worker or scheduler process."""

    id = TextField(primary_key=True)
    kind = TextField()
    host = TextField()
    pid = IntegerField()
    queues = JSONField(default=list)
    threads = IntegerField()
    busy = IntegerField()
    version = TextField()
    started_at = UtcDateTimeField()
    heartbeat_at = UtcDateTimeField()
    stopped = BooleanField(default=False)

    class Meta:
        table_name = "processes"
        schema = "housekeeping"


class Action(BaseModel):
    """One action of an operator; `result` is NULL until it has ended."""

    id = BigAutoField()
    at = UtcDateTimeField()
    user_name = TextField()
    action = TextField()
    target = TextField()
    result = TextField(null=True)

    class Meta:
        table_name = "actions"
        schema = "housekeeping"


class Acknowledgment(BaseModel):
    """An operator's statement that an alert is known.

    Attributes:
      worker: The alert's worker; empty for an alert of the whole installation.
    """

    worker = TextField()
    alert = TextField()
    at = UtcDateTimeField()
    user_name = TextField()

    class Meta:
        table_name = "acknowledgments"
        schema = "housekeeping"
        primary_key = CompositeKey("worker", "alert")


#: Every model of the library's own tables.
MODELS: Final = (
    Run,
    Lease,
    Switch,
    SwitchChange,
    Rejection,
    RejectionReport,
    OutboxRow,
    ProcessRow,
    Action,
    Acknowledgment,
)
