"""Registry of actors by name, for stages that enqueue messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from housekeeping.core.errors import DeclarationError

if TYPE_CHECKING:
    from dramatiq import Actor

_actors: dict[str, Actor[..., Any]] = {}

#: Registers the actors on first use; set by a process that runs sweeps without its own broker, such as
#: ``housekeeping run``.
provide: Callable[[], object] | None = None


def remember(actor: Actor[..., Any]) -> None:
    """Add an actor for `actor_named`, in place of an earlier one of its name."""
    _actors[actor.actor_name] = actor


def forget_all() -> None:
    """Remove all actors; for tests."""
    _actors.clear()


def provide_by(make: Callable[[], object] | None) -> None:
    """Set the function that registers the actors on first use."""
    global provide
    provide = make


def actor_named(name: str) -> Actor[..., Any]:
    """Return the actor of this name.

    Raises:
      DeclarationError: No such actor is registered.
      SettingsError: The broker cannot be created because a setting is missing or wrong.
    """
    if name not in _actors and provide is not None:
        provide()
    try:
        return _actors[name]
    except KeyError:
        raise DeclarationError(f"no actor {name!r} is registered; call housekeeping.install(broker) first") from None
