"""Broken twins of the library. Each breaks one promise, and the simulator must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dramatiq.brokers.redis import RedisBroker

from tests.internals.brokers import ReliableRedisBroker
from tests.internals.database import database
from tests.internals.engine import Commit
from tests.internals.leases import renewal
from tests.internals.ledger import runs
from tests.internals.middleware import Admission, delivery, keys, retries, schedule

Twin = Callable[[], None]


def _without(module: Any, name: str, *parts: tuple[str, str]) -> None:
    """Replace parts of a script of a module."""
    text = getattr(module, name)
    for before, after in parts:
        assert before in text, f"{name} no longer has {before!r}"
        text = text.replace(before, after)
    setattr(module, name, text)


def epoch_not_checked() -> None:
    """Let a paused run commit after another run started."""
    write: Any = runs._write
    runs._write = lambda run_id, lease, **columns: write(run_id, None, **columns)


def held_lease_granted() -> None:
    """Grant a lease that another run holds."""
    _without(renewal, "_OBTAIN", ("if holder and holder ~= given.token then return holder end", ""))


def lease_released_without_its_token() -> None:
    """Release a lease without its holder's token."""
    _without(renewal, "_RELEASE", ('if redis.call("get", KEYS[1]) ~= given.token then return 0 end', ""))


def unavailable_redis_grants_leases() -> None:
    """Treat a lease as acquired if Redis does not answer."""
    ask: Any = Admission._ask

    def hopeful(self: Any, script: Any, parts: Any, **flags: bool) -> Any:
        try:
            return ask(self, script, parts, **flags)
        except Exception:
            if script is not self._admit:
                raise
            mark, lease = (parts[name][1]["token"] if parts[name] else "" for name in ("mark", "lease"))
            return [mark, "ours", lease, 0]

    Admission._ask = hopeful  # type: ignore[method-assign]


def duplicates_enqueued() -> None:
    """Grant a key that another message holds."""
    _without(keys, "CLAIM", ("if holder and holder ~= message_id then", "if false then"))


def key_released_by_another_message() -> None:
    """Release the key of another message at the end."""
    _without(
        keys,
        "RELEASE",
        ("if holder ~= given.message_id then return run and 2 or 0 end", ""),
        ("if held_by ~= run and (given.started or held_by) then return 0 end", ""),
    )


def key_never_released() -> None:
    """Never release a key before its ttl ends."""
    keys.RELEASE = "return 0"  # type: ignore[misc]


def rerun_not_requested() -> None:
    """Ignore a duplicate during a run."""
    _without(keys, "CLAIM", ('redis.call("hset", KEYS[1], "again", "1")', ""))


def completed_message_runs_again() -> None:
    """Run a redelivery of a completed message."""
    _without(delivery, "_BEGIN", ('if completed then return "completed:" .. completed end', ""))


def second_delivery_runs() -> None:
    """Run two deliveries of a message at the same time."""
    _without(delivery, "_BEGIN", ("if running and running ~= given.token then return running end", ""))


def counts_outside_the_transaction() -> None:
    """Write counts and cursor after the commit."""

    def commit(self: Commit, stage: Any, apply: Any, record: Any) -> Any:
        with database.atomic():
            done = apply()
        with database.atomic():
            return done, record(done)

    Commit.in_transaction = commit  # type: ignore[method-assign]


def cursor_before_the_batch() -> None:
    """Commit the cursor before the batch."""

    class Undone(Exception):
        pass

    def commit(self: Commit, stage: Any, apply: Any, record: Any) -> Any:
        try:
            with database.atomic():
                done = apply()
                raise Undone
        except Undone:
            pass
        with database.atomic():
            after = record(done)
        with database.atomic():
            return apply(), after

    Commit.in_transaction = commit  # type: ignore[method-assign]


def retry_lost_while_redis_is_away() -> None:
    """Enqueue a retry only once, and acknowledge its message regardless."""

    def once(step: Callable[[], Any], event: str) -> Any:
        try:
            return step()
        except retries._AWAY:
            return None

    retries.retry_until_available = once


def lost_deliveries_never_requeued() -> None:
    """Leave a lost delivery with its process."""
    ReliableRedisBroker.consume = RedisBroker.consume  # type: ignore[method-assign]


def tick_sent_by_every_scheduler() -> None:
    """Ignore the claim of a tick."""
    vars(schedule)["CLAIM"] = "return 1"


def missed_ticks_not_recorded() -> None:
    """Record no outcome for missed ticks."""
    runs.record_missed = lambda *_: 0


TWINS: Final[dict[str, Twin]] = {
    name: each
    for name, each in list(globals().items())
    if callable(each) and not name.startswith("_") and getattr(each, "__module__", "") == __name__
}
