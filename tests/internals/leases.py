"""Parts of `housekeeping.leases` that tests use."""

from __future__ import annotations

from housekeeping.leases import lease, renewal
from housekeeping.leases.lease import acquire_epoch, check_epoch, current_lease
from housekeeping.leases.renewal import RedisLeaseStore, Renewal, Renewals, elapsed, lease_store
from housekeeping.ledger.leases import Fence, Holder, LeaseStore, PostgresLeaseStore, holder_of, new_token
from housekeeping.ledger.schema import HeldLeaseRow, LeaseRow
