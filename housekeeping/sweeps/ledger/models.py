"""The library's own tables as models; `schema` makes them, `ledger` and `switches` use them."""

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

from housekeeping.database.connection import BaseModel, UtcDateTimeField
from housekeeping.leases.fencing import Lease as Lease

#: The database's clock, because several machines write and compare these times.
NOW: Final = SQL("clock_timestamp()")


class Run(BaseModel):
    """One attempt to do one worker's work; `outcome` is null while it goes on."""

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

    class Meta:
        table_name = "runs"
        schema = "housekeeping"


class Switch(BaseModel):
    """What an operator said of a worker: paused, or narrowed, until when and why."""

    worker = TextField(primary_key=True)
    state = TextField()
    reason = TextField(null=True)
    until = UtcDateTimeField(null=True)
    since = UtcDateTimeField()
    said_by = TextField(null=True)
    batch_size = IntegerField(null=True)
    max_runtime_s = DoubleField(null=True)

    class Meta:
        table_name = "switches"
        schema = "housekeeping"


class SwitchChange(BaseModel):
    """One thing that an operator said, kept; `state` is ``on`` where a switch was ended."""

    id = BigAutoField()
    worker = TextField()
    state = TextField()
    reason = TextField(null=True)
    until = UtcDateTimeField(null=True)
    at = UtcDateTimeField()
    said_by = TextField(null=True)
    batch_size = IntegerField(null=True)
    max_runtime_s = DoubleField(null=True)

    class Meta:
        table_name = "switch_changes"
        schema = "housekeeping"


class Rejection(BaseModel):
    """The records that a worker could not settle for one cause, as its last run met them.

    Attributes:
      subject: The run's argument as text; empty for a worker without one.
      rows: How many its last run met.
      times: Runs in a row that rejected every record they met; 0 when the last one settled some.
      not_before: When a run for the subject is worth scheduling again; None: at any time.
      position: Where the last run ended, in the form of the ledger's cursor.
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
    """When a cause of a worker's rejections was last sent to the error tracker."""

    worker = TextField()
    cause = TextField()
    reported_at = UtcDateTimeField()

    class Meta:
        table_name = "rejection_reports"
        schema = "housekeeping"
        primary_key = CompositeKey("worker", "cause")


class OutboxRow(BaseModel):
    """One row of an event that a handler has yet to be given; deleted once it has been."""

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


#: Every model of the library's own tables.
MODELS: Final = (Run, Lease, Switch, SwitchChange, Rejection, RejectionReport, OutboxRow, ProcessRow)
