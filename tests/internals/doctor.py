"""Parts of `housekeeping.doctor` that tests use."""

from __future__ import annotations

from housekeeping import doctor
from housekeeping.database.queries import explain
from housekeeping.doctor import examine, servers, stages, tables
from housekeeping.doctor.servers import _memory, _persistence
from housekeeping.doctor.stages import examine_stages, fault_of
from housekeeping.doctor.tables import (
    grants,
    lone_partitions,
    missing_rights,
    name_in_sql,
    needed_rights,
    rights_of_dependents,
    rights_of_subjects,
    tables_of,
    users_by_table,
)
