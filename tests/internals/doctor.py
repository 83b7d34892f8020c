"""Parts of `housekeeping.doctor` that tests use."""

from __future__ import annotations

from housekeeping import doctor
from housekeeping.database.queries import explain
from housekeeping.doctor import examine, stages, tables
from housekeeping.doctor import servers as brokers
from housekeeping.doctor import servers as postgres
from housekeeping.doctor import servers as redis_server
from housekeeping.doctor import stages as throttles
from housekeeping.doctor import tables as archives
from housekeeping.doctor import tables as columns
from housekeeping.doctor import tables as partitions
from housekeeping.doctor.servers import _memory, _persistence
from housekeeping.doctor.stages import examine_stages, fault_of
from housekeeping.doctor.tables import (
    grants,
    missing_rights,
    name_in_sql,
    needed_rights,
    rights_of_dependents,
    rights_of_subjects,
    tables_of,
    users_of,
)
from housekeeping.doctor.tables import lone_partitions as partition_findings
