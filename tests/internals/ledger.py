"""Parts of `housekeeping.ledger` that tests use."""

from __future__ import annotations

from housekeeping.ledger import history, migrations, outbox, runs, schema, ticks
from housekeeping.ledger import operators as action_log
from housekeeping.ledger import operators as override_rows
from housekeeping.ledger import processes as heartbeats
from housekeeping.ledger import runs as batch_row
from housekeeping.ledger import runs as run_queries
from housekeeping.ledger import runs as run_start
from housekeeping.ledger.alerts import Acknowledged, Reconciled, acknowledge, claim_evaluation, reconcile
from housekeeping.ledger.erasures import key_hmac
from housekeeping.ledger.history import RUNNING, Position, RunFilter, RunRecord, read_page
from housekeeping.ledger.leases import HeldLease, UnknownLease, held_leases, release_lease
from housekeeping.ledger.operators import (
    Override,
    logged_actions,
    override_of,
    overrides,
    record_action,
    record_deployment,
    resume,
    switch,
)
from housekeeping.ledger.processes import SILENCE as PROCESS_SILENCE
from housekeeping.ledger.processes import (
    UNKNOWN,
    BusyThread,
    Heartbeat,
    PostgresHeartbeats,
    Process,
    Processes,
    RedisHeartbeats,
    read_processes,
)
from housekeeping.ledger.runs import PREDICATE, SILENCE, Counts, RunRow, RunStart, begin, deferred
from housekeeping.ledger.schema import (
    NOW,
    Action,
    AlertRow,
    Completion,
    DetachedPartition,
    Erasure,
    Evaluation,
    OutboxRow,
    Rejection,
    Run,
    Switch,
    TableSize,
    TickRow,
    run_label,
    use_database,
)
