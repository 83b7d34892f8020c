"""Sweeps of a shop: of a table, of a partition of another one, and one that fails."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from peewee import BigAutoField, BigIntegerField, CompositeKey

from housekeeping import BaseModel, Delete, Rows, Sweep, UtcDateTimeField


class Coupon(BaseModel):
    id = BigAutoField()
    expires_at = UtcDateTimeField()


class MetricNew(BaseModel):
    id = BigIntegerField()
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "metric_new"
        primary_key = CompositeKey("id", "expires_at")


def _sweep(name: str, model: Any, age: Any = timedelta()) -> Sweep:
    return Sweep(
        name, Rows(model, stale=lambda row, now: row.expires_at < now - age, order="expires_at", action=Delete())
    )


SWEEPS = (
    _sweep("shop.coupons", Coupon),
    _sweep("shop.metrics", MetricNew),
    _sweep("shop.mistyped", Coupon, 14),
)
