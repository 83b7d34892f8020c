"""Old release with one parameter."""

from __future__ import annotations

from typing import Any, Final

import dramatiq

from tests.chaos import shop

broker: Final = shop.compose()


def charge(order_id: int) -> None:
    """Charge for it."""
    shop.charge(order_id, "EUR", "old")


_declare: Any = dramatiq.actor(**shop.CHARGE)
actors: Final = {shop.ACTOR: _declare(charge)}
