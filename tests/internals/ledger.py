"""Parts of `housekeeping.ledger` that tests use."""

from __future__ import annotations

from housekeeping.ledger import history, migrations, operators, outbox, processes, runs, schema, ticks
from housekeeping.ledger.alerts import Acknowledged, acknowledge, claim_evaluation, reconcile
from housekeeping.ledger.erasures import key_hmac
from housekeeping.ledger.history import RUNNING, RunFilter, RunPosition, RunRecord, read_page
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
    heartbeat_store,
    read_processes,
)
from housekeeping.ledger.runs import PREDICATE, SILENCE, Counts, RunRow, RunStart, begin, deferred
from housekeeping.ledger.schema import (
    NOW,
    ActionRow,
    AlertRow,
    Completion,
    DetachedPartition,
    Erasure,
    Evaluation,
    OutboxRow,
    ProcessRow,
    Rejection,
    Run,
    Switch,
    TableSize,
    TickRow,
    run_label,
    use_database,
)
