"""Parts of `housekeeping.engine` that tests use."""

from __future__ import annotations

from housekeeping.engine import RunResult, added, batches, failures, guard, run, speed
from housekeeping.engine.commit import REFUSED, Commit
from housekeeping.engine.failures import CAUSES, LINES, OTHER_CAUSES, SAMPLES, Rejected, Rejections, record
from housekeeping.engine.guard import AT_LEAST, FLOOR, ONE_IN, RowGuard, fingerprint, in_numbers, stale_if_outgrown
from housekeeping.engine.purge import PurgeRequest, recorded_request, request_of, sweep_of
from housekeeping.engine.registry import archive_sweep, by_database, declared_by, family_of, register
from housekeeping.engine.restore import restoration_of
from housekeeping.engine.run import record_run, run_sweep, stored_traceback
from housekeeping.engine.speed import DbHealth, Speed, ThrottleWatch, WalRate, WalState, read_health, read_wal
from housekeeping.sweeps import send
from housekeeping.sweeps.restored_rows import Restore
from housekeeping.sweeps.send import actor_named
from housekeeping.sweeps.values import Finding
