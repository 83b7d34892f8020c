"""Broken twins of the library. Each breaks one promise, and the simulator must find it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from dramatiq.brokers.redis import RedisBroker

from housekeeping.brokers import redis as redis_broker
from housekeeping.brokers.redis import ReliableRedisBroker
from housekeeping.database.connection import database
from housekeeping.leases import store
from housekeeping.middleware import idempotency, reliable_enqueue
from housekeeping.middleware.admission import Admission
from housekeeping.middleware.deduplication import scripts
from housekeeping.middleware.deduplication.middleware import Deduplication
from housekeeping.middleware.schedule import tick_rows, tick_store
from housekeeping.sweeps.engine.executor import Executor
from housekeeping.sweeps.ledger import run_queries, run_start, runs
from housekeeping.sweeps.ledger.models import NOW, Lease

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


def epoch_stays_the_same() -> None:
    """Give every acquisition of a lease the same epoch."""

    def first(key: str, token: str) -> int:
        taken = {Lease.epoch: 1, Lease.holder: token, Lease.used_at: NOW}
        Lease.insert({Lease.key: key, **taken}).on_conflict(conflict_target=[Lease.key], update=taken).execute()
        return 1

    module: Any = run_start
    module.next_epoch = first


def held_lease_granted() -> None:
    """Grant a lease that another run holds."""
    _without(store, "_OBTAIN", ("if holder and holder ~= ARGV[1] then return holder end", ""))


def lease_released_without_its_token() -> None:
    """Release a lease without its holder's token."""
    _without(store, "_RELEASE", ('if redis.call("get", KEYS[1]) ~= ARGV[1] then return 0 end', ""))


def lease_renewed_without_its_token() -> None:
    """Renew a lease without its holder's token."""
    _without(store, "_RENEW", ('if redis.call("get", KEYS[1]) ~= ARGV[1] then return 0 end', ""))


def unavailable_redis_grants_leases() -> None:
    """Treat a lease as acquired if Redis does not answer."""
    ask: Any = Admission._ask

    def hopeful(self: Any, script: Any, parts: Any, flag: bool) -> Any:
        try:
            return ask(self, script, parts, flag)
        except Exception:
            if script is not self._admit:
                raise
            mark, lease = ((its_args or [""])[0] for _, its_args in parts[::2])
            return [mark, "ours", lease, 0]

    Admission._ask = hopeful  # type: ignore[method-assign]


def living_holder_considered_dead() -> None:
    """Take over the lease of a living run."""
    run_queries.holder_is_gone = lambda worker, key, token: True


def key_kept_by_a_message_that_did_not_start() -> None:
    """Release a key only if its run had started."""
    end: Any = Deduplication.end

    def of_runs_only(self: Any, actor: Any, message: Any) -> Any:
        ending = end(self, actor, message)
        return ending if ending is not None and ending.delivery.token else None

    Deduplication.end = of_runs_only  # type: ignore[method-assign]


def duplicates_enqueued() -> None:
    """Grant a key that another message holds."""
    _without(scripts, "CLAIM", ("if holder and holder ~= message_id then", "if false then"))


def key_released_by_another_message() -> None:
    """Release the key of another message at the end."""
    _without(
        scripts,
        "RELEASE",
        ('if redis.call("hget", KEYS[1], "id") ~= message_id then return run ~= "" and 2 or 0 end', ""),
        ('if (redis.call("hget", KEYS[1], "run") or "") ~= run then return 0 end', ""),
    )


def key_never_released() -> None:
    """Never release a key before its ttl ends."""
    scripts.RELEASE = "return 0"  # type: ignore[misc]


def key_not_renewed() -> None:
    """Do not renew the key of a long run."""
    _without(scripts, "RENEW", ('return redis.call("pexpire", KEYS[1], ARGV[2])', "return 1"))


def key_released_while_a_retry_waits() -> None:
    """Release the key of a message that waits for its retry."""
    _without(scripts, "RETAIN", ('redis.call("hset", KEYS[1], "id", message_id, "state", state)', ""))


def retry_dropped_as_its_own_duplicate() -> None:
    """Drop a retry as a duplicate of its own message."""
    _without(scripts, "RETAIN", ('local holder = redis.call("hget", KEYS[1], "id")', 'return "other"--'))


def superseded_retry_forgotten() -> None:
    """Let a superseded retry run."""
    _without(scripts, "CLAIM", ("mark_superseded(holder, message_id)", ""))


def any_holder_superseded() -> None:
    """Supersede waiting and running messages."""
    _without(
        scripts,
        "CLAIM",
        (
            'if holder and holder ~= message_id and supersede_after ~= "" '
            "and retry_due_in() > tonumber(supersede_after) then",
            "if holder then",
        ),
    )


def rerun_not_requested() -> None:
    """Ignore a duplicate during a run."""
    _without(scripts, "CLAIM", ('redis.call("hset", KEYS[1], "again", "1")', ""))


def requested_rerun_skipped() -> None:
    """Skip the requested further run."""
    _without(scripts, "RELEASE", ('not free_anyway and redis.call("hget", KEYS[1], "again")', "false"))


def completed_message_runs_again() -> None:
    """Run a redelivery of a completed message."""
    _without(idempotency, "_BEGIN", ('if redis.call("exists", KEYS[1]) == 1 then return "completed" end', ""))


def second_delivery_runs() -> None:
    """Run two deliveries of a message at the same time."""
    _without(idempotency, "_BEGIN", ("if running and running ~= ARGV[1] then return running end", ""))


def completed_before_it_ran() -> None:
    """Record a message as completed when it starts."""
    _without(
        idempotency,
        "_BEGIN",
        ("return ARGV[1]", 'redis.call("set", KEYS[1], "1", "px", 3600000) return ARGV[1]'),
    )


def counts_outside_the_transaction() -> None:
    """Write counts and cursor after the commit."""

    def commit(self: Executor, apply: Any, state: Any, record: Any) -> Any:
        with database.atomic():
            done = apply()
        with database.atomic():
            return done, record(state, done)

    Executor.commit = commit  # type: ignore[method-assign]


def cursor_before_the_batch() -> None:
    """Commit the cursor before the batch."""

    class Undone(Exception):
        pass

    def commit(self: Executor, apply: Any, state: Any, record: Any) -> Any:
        try:
            with database.atomic():
                done = apply()
                raise Undone
        except Undone:
            pass
        with database.atomic():
            after = record(state, done)
        with database.atomic():
            return apply(), after

    Executor.commit = commit  # type: ignore[method-assign]


def completion_not_recorded_in_the_ledger() -> None:
    """Start another run for a redelivery of a completed sweep."""
    run_queries.completed = lambda message_id: False


def retry_lost_while_redis_is_away() -> None:
    """Enqueue a retry only once, and acknowledge its message regardless."""

    def once(step: Callable[[], Any], event: str) -> Any:
        try:
            return step()
        except reliable_enqueue._AWAY:
            return None

    reliable_enqueue.retry_until_available = once


def dead_workers_messages_never_requeued() -> None:
    """Never requeue the messages of dead workers."""
    RedisBroker._should_do_maintenance = lambda self, command: 0  # type: ignore[method-assign]


def lost_deliveries_never_requeued() -> None:
    """Leave a lost delivery with its process."""
    ReliableRedisBroker.consume = RedisBroker.consume  # type: ignore[method-assign]


def lost_deliveries_requeued_only_on_connect() -> None:
    """Look for lost deliveries only when connecting."""
    redis_broker._time_of_next_check = lambda: math.inf


def tick_sent_by_every_scheduler() -> None:
    """Ignore the claim of a tick."""
    tick_store.CLAIM = "return 1"  # type: ignore[attr-defined]


def missed_ticks_not_recorded() -> None:
    """Record no outcome for missed ticks."""
    tick_rows.write_missed = lambda *_: 0


TWINS: Final[dict[str, Twin]] = {
    name: each
    for name, each in list(globals().items())
    if callable(each) and not name.startswith("_") and getattr(each, "__module__", "") == __name__
}
