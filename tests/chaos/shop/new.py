"""New release: the parameter is renamed, and another one is added."""

from __future__ import annotations

from typing import Any, Final

import dramatiq

from tests.chaos import shop

broker: Final = shop.compose()


def charge(order: int, currency: str = "EUR") -> None:
    """Charge for it in a currency."""
    shop.charge(order, currency, "new")


_declare: Any = dramatiq.actor(**shop.CHARGE)
actors: Final = {shop.ACTOR: _declare(charge)}
