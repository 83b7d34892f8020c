"""Sweeps of an example application on one table: expiry after an external effect, and deletion."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from peewee import BigAutoField, TextField

from housekeeping import BaseModel, Call, Delete, Rows, StateMachine, Sweep, Transition, UtcDateTimeField


class State(StrEnum):
    OPEN = "open"
    USED = "used"
    EXPIRED = "expired"


class Coupon(BaseModel):
    id = BigAutoField()
    state = TextField()
    expires_at = UtcDateTimeField()
    ended_at = UtcDateTimeField(null=True)


machine: Final = StateMachine(Coupon.state, State, {"expire": ([State.OPEN], State.EXPIRED)})
told: Final[list[int]] = []


def _old(row: Any, now: datetime) -> Any:
    return (row.state == State.OPEN) & (row.expires_at <= now)


old_coupons: Final = Sweep(
    "shop.old_coupons",
    Rows(
        Coupon,
        stale=_old,
        order="expires_at",
        action=Call(
            lambda coupon: told.append(coupon.id),
            then=Transition(machine, "expire", "expired", changes=lambda now: {Coupon.ended_at: now}),
        ),
    ),
    schedule="*/5 * * * *",
)

used_coupons: Final = Sweep(
    "shop.used_coupons", Rows(Coupon, stale=lambda row: row.state == State.USED, action=Delete())
)
