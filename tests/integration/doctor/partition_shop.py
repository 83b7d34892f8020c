"""Sweeps of a shop: of a table, of a partition of another one, and one that fails."""

from __future__ import annotations

from typing import Any

from peewee import BigAutoField, BigIntegerField, CompositeKey

from housekeeping import BaseModel, Delete, Sweep, UtcDateTimeField


class Coupon(BaseModel):
    id = BigAutoField()
    expires_at = UtcDateTimeField()


class MetricNew(BaseModel):
    id = BigIntegerField()
    expires_at = UtcDateTimeField()

    class Meta:
        table_name = "metric_new"
        primary_key = CompositeKey("id", "expires_at")


def _sweep(name: str, model: Any, column: str = "expires_at") -> Sweep:
    return Sweep(
        name=name,
        stale=lambda now: getattr(model, column) < now,
        order=(model.expires_at, model.id),
        action=Delete(),
    )


SWEEPS = (
    _sweep("shop.coupons", Coupon),
    _sweep("shop.metrics", MetricNew),
    _sweep("shop.misspelled", Coupon, "expired_at"),
)
