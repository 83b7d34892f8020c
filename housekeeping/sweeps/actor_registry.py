"""Where a pass finds the actors it enqueues: those that were registered last, made when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dramatiq import Actor

from housekeeping.core.errors import DeclarationError

_actors: dict[str, Actor[..., Any]] = {}

#: Registers actors when a pass asks for one and none is there; set by a process that runs sweeps without a
#: broker of its own, such as ``housekeeping run``.
provide: Callable[[], object] | None = None


def remember(actor: Actor[..., Any]) -> None:
    """Keep a registered actor for `actor_named`; a later one of the same name takes its place."""
    _actors[actor.actor_name] = actor


def forget_all() -> None:
    """As if nothing had been registered; for tests."""
    _actors.clear()


def provide_by(make: Callable[[], object] | None) -> None:
    """Set what registers actors once a pass asks for one and none is there."""
    global provide
    provide = make


def actor_named(name: str) -> Actor[..., Any]:
    """The actor of this name, on the broker it was registered with.

    Raises:
      DeclarationError: When there is none, and none could be made.
      SettingsError: When the broker cannot be made because a setting is missing or wrong.
    """
    if name not in _actors and provide is not None:
        provide()
    try:
        return _actors[name]
    except KeyError:
        raise DeclarationError(f"no actor {name!r} is registered; call housekeeping.install(broker) first") from None
