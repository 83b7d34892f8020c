"""Sweeps of an example application on one table: expiry after an external effect, and deletion."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from peewee import BigAutoField, TextField

from housekeeping import BaseModel, Call, Delete, StateMachine, Sweep, Transition, UtcDateTimeField


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


def _old(now: datetime) -> Any:
    return (Coupon.state == State.OPEN) & (Coupon.expires_at <= now)


old_coupons: Final = Sweep(
    name="shop.old_coupons",
    stale=_old,
    order=(Coupon.expires_at, Coupon.id),
    action=Call(
        lambda coupon: told.append(coupon.id),
        then=Transition(machine, "expire", "expired", changes=lambda now: {Coupon.ended_at: now}),
    ),
    schedule="*/5 * * * *",
)

used_coupons: Final = Sweep(
    name="shop.used_coupons",
    stale=lambda now: Coupon.state == State.USED,
    always_stale=True,
    order=(Coupon.id,),
    action=Delete(),
)
