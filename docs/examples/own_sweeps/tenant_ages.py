"""Delete events that are older than their tenant's retention."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from peewee import BigAutoField, BigIntegerField, Function, IntegerField, Value, fn

from housekeeping import BaseModel, Delete, Limits, Row, Rows, Sweep, UtcDateTimeField


class Tenant(BaseModel):
    id = BigAutoField()
    keep_days = IntegerField(null=True)


class TenantEvent(BaseModel):
    id = BigAutoField()
    tenant_id = BigIntegerField()
    created_at = UtcDateTimeField()


def outlived(row: Row, now: datetime) -> Function:
    """Return the predicate of events older than their tenant's retention. NULL keeps events forever."""
    age = fn.make_interval(0, 0, 0, Tenant.keep_days)
    tenants: Any = Tenant  # peewee's stubs do not type the arguments of a query
    of_tenant = Tenant.id == row.tenant_id
    return fn.EXISTS(tenants.select().where(of_tenant & (row.created_at < Value(now) - age)))


outlived_events = Sweep(
    "shop.outlived_events",
    Rows(TenantEvent, stale=outlived, order=("tenant_id", "created_at"), action=Delete()),
    schedule="30 * * * *",
    limits=Limits(resume="after_limit"),
)
