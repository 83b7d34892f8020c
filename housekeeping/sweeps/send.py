"""Stage that sends messages to other actors, and the registry in which it finds them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from housekeeping.core.errors import DeclarationError
from housekeeping.core.logs import error_line
from housekeeping.core.logs import logger as named_logger
from housekeeping.sweeps.stage import Backlog, Batch, BatchResult, StagePlan

if TYPE_CHECKING:
    from dramatiq import Actor

logger = named_logger(__name__)

_actors: dict[str, Actor[..., Any]] = {}

#: Registers the actors on first use; set by a process that runs sweeps without its own broker, such as
#: ``housekeeping run``.
provide: Callable[[], object] | None = None


@dataclass(frozen=True)
class Send:
    """Stage that sends a message to each of these actors, without arguments and with its own delay.

    ::

        Send({"ci.stuck_builds.drop_pending": timedelta(0), "ci.stuck_builds.drop_running": timedelta(minutes=15)})

    It needs no table, and sends even if the run cannot reach its database. If a message cannot be sent, the others are,
    and the run fails and is retried. Deduplicate the actors, because a retry sends every message again.

    Attributes:
      delays: Name of the actor -> delay; zero for at once.
    """

    delays: Mapping[str, timedelta]
    name: ClassVar[str] = "messages"
    needs_redis: ClassVar[str] = "it sends messages"
    batch_size: ClassVar[int] = 1
    counts: ClassVar[tuple[str, ...]] = ("enqueued", "deduplicated")
    progress_counts: ClassVar[tuple[str, ...]] = ()

    def prepare(self, batch: Batch) -> BatchResult:
        return self.send()

    def send(self) -> BatchResult:
        """Send the messages, and return how many; a failure does not keep the others from being sent."""
        sent, errors = dict.fromkeys(self.counts, 0), list[Exception]()
        for name, delay in self.delays.items():
            try:
                delay_ms = int(delay.total_seconds() * 1000) or None
                message = actor_named(name).send_with_options(delay=delay_ms, trigger="parent")
            except Exception as error:
                logger.error("Message not sent", actor=name, error=error_line(error))
                errors.append(error)
            else:
                sent["deduplicated" if "duplicate_of" in message.options else "enqueued"] += 1
        return BatchResult(sent, unreachable=errors[0] if errors else None)

    def apply(self, batch: Batch, prepared: BatchResult) -> BatchResult:
        return prepared

    def after_commit(self, batch: Batch, result: BatchResult) -> None: ...

    def backlog(self, now: datetime, limit: int, argument: Any = None) -> Backlog:
        return Backlog(0)

    def oldest(self, now: datetime, argument: Any = None) -> Any:
        return None

    def plan(self, now: datetime, limit: int, argument: Any = None) -> StagePlan:
        """Return the actors and their delays, without knowing which messages would be duplicates."""
        samples = [{"actor": name, "delay_s": delay.total_seconds()} for name, delay in self.delays.items()]
        return StagePlan(self.name, Backlog(0), {"enqueued": len(self.delays)}, samples=samples, title="messages")


def remember(actor: Actor[..., Any]) -> None:
    """Let `actor_named` return this actor, in place of an earlier one of its name."""
    _actors[actor.actor_name] = actor


def forget_all() -> None:
    """Remove the actors that `actor_named` returns, so that a test begins without those of another one."""
    _actors.clear()


def provide_by(make: Callable[[], object] | None) -> None:
    """Set the function that `actor_named` calls to register the actors, when it is asked for an unknown one."""
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
