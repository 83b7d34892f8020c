"""Delete events that are older than their tenant's retention."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from peewee import BigAutoField, BigIntegerField, Expression, IntegerField, Value, fn

from housekeeping import BaseModel, Delete, Sweep, UtcDateTimeField


class Tenant(BaseModel):
    id = BigAutoField()
    keep_days = IntegerField(null=True)


class TenantEvent(BaseModel):
    id = BigAutoField()
    tenant_id = BigIntegerField()
    created_at = UtcDateTimeField()


def outlived(now: datetime) -> Expression:
    """Return the predicate of events older than their tenant's retention. NULL keeps events forever."""
    age = fn.make_interval(0, 0, 0, Tenant.keep_days)
    tenants: Any = Tenant  # peewee's stubs do not type the arguments of a query
    limit = tenants.select(Value(now) - age).where(Tenant.id == TenantEvent.tenant_id)
    stale: Expression = TenantEvent.created_at < limit
    return stale


outlived_events = Sweep(
    name="shop.outlived_events",
    stale=outlived,
    order=(TenantEvent.created_at, TenantEvent.id),
    action=Delete(),
    schedule="30 * * * *",
)
