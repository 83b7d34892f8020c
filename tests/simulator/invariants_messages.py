"""Invariants of messages, their keys and leases, within the limits of docs/explanation/promises.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulator.stage import Event, Stage
from tests.simulator.workload import ACTORS, KEY_TTL, SCHEDULED

_UNTIL_EXECUTED = tuple(name for name, options in ACTORS.items() if options.get("deduplicate") == "until_executed")


def no_token_replaces_another_holders(stage: Stage) -> Iterator[str]:
    """D5, L1: only the holder or the ttl frees keys, leases and marks."""
    for when, where, _, key, before, after, holder in stage.of("taken from another"):
        yield f"{where} changed {key} at {when}, which {holder} held: {before!r} became {after!r}"


@dataclass
class _Life:
    """Life of a message of an until_executed actor, from its first enqueued copy to its last."""

    message_id: str
    copies: set[str] = field(default_factory=set)
    sign_at: float = 0.0  # last sign of life
    runs_in: str | None = None
    ran_in: str | None = None
    over: bool = False  # has ended or freed its key
    put_back: bool = False  # delivered but not started
    delivered_to: str | None = None
    stopped_at: float = 0.0  # when its process was paused
    lapsed: bool = False  # its key expired, and another message may hold it


def at_most_one_message_of_a_key_is_live(stage: Stage) -> Iterator[str]:
    """D1, D6, D7: one live message per key, until its holder is silent for a ttl."""
    ttl = KEY_TTL.total_seconds()
    lives: dict[tuple[str, str], dict[str, _Life]] = {}
    of_copy: dict[str, tuple[tuple[str, str], str]] = {}
    excused: set[str] = set()
    completed: set[str] = set()
    messages = ("queued", "left", "delivered", "reads", "returns", "fails", "interrupted", "completed")
    for event in stage.events(*messages, "killed", "fault", "redis emptied", "key"):
        when, where, what, *details = event
        if what == "completed":
            completed.add(details[0])
        elif what == "redis emptied":
            completed.clear()
            # Their keys are lost. A running message continues without its key.
            excused |= {message_id for there in lives.values() for message_id in there}
            lives.clear()
        elif what == "queued":
            queue, message_id, copy, actor, args = details
            if actor not in _UNTIL_EXECUTED or message_id in completed:
                continue  # a copy in a paused process: it is already completed, so it is not live
            key, body = (actor, args), stage.redis.messages[copy.encode()]
            if body["options"].get("deduplication_standing") == "when_due":
                continue  # not live until due
            there = lives.setdefault(key, {})
            life = there.setdefault(message_id, _Life(message_id, lapsed=message_id in excused))
            if life.copies and life.runs_in is None and life.sign_at + ttl <= when:
                life.lapsed = True  # it waited longer than the ttl, so its key may have expired
            for other in there.values():
                if other is life or other.over or life.lapsed:
                    continue
                if other.runs_in is None and other.sign_at + ttl <= when:
                    other.lapsed = True
                elif not other.lapsed:
                    yield f"{message_id} of {key} was enqueued at {when} while {other.message_id} was live"
            life.over = False
            life.runs_in = None if life.runs_in == where else life.runs_in
            # Time counts from its due time (D4), not from when a worker noticed.
            due = not queue.endswith(".DQ.msgs") and any(
                "eta" in stage.redis.messages[before.encode()]["options"] for before in life.copies
            )
            life.copies.add(copy)
            if not life.put_back and not due:
                # A delivery that waits because its dead predecessor seems to run is no sign of life.
                life.sign_at = max(when, body["options"].get("eta", 0) / 1000)
            of_copy[copy] = (key, message_id)
        elif what == "left" and details[2] in of_copy:
            key, message_id = of_copy.pop(details[2])
            there = lives.get(key, {})
            if message_id in there:
                there[message_id].copies.discard(details[2])
                if not there[message_id].copies:
                    # A paused process may still have a delivery of it.
                    excused |= {message_id} if there[message_id].lapsed else set()
                    del there[message_id]
        else:
            _signs(lives, event)


def _signs(lives: dict[tuple[str, str], dict[str, _Life]], event: Event) -> None:
    when, where, what, *details = event
    for there in lives.values():
        for life in there.values():
            if what in ("reads", "returns", "fails") and details[2] == life.message_id:
                if what == "reads":
                    # Or its process was paused between its start and the actor's first line.
                    life.lapsed = life.lapsed or life.stopped_at > life.sign_at
                    life.sign_at = when
                if what != "fails":  # a failure keeps its key when its retry is enqueued, and may be killed before
                    life.runs_in = where if what == "reads" else None
                life.ran_in, life.put_back = where, False
            if what == "delivered" and details[1] == life.message_id:
                life.delivered_to = where
            if what == "fault" and details[0].startswith("pause") and life.delivered_to == where:
                life.stopped_at = when
            if what == "interrupted" and details[2] == life.message_id and life.runs_in is None:
                life.put_back = details[3] == "Requeue"
            mine = life.message_id.encode()
            freed = what == "key" and (details[1] or b"").startswith(mine) and not (details[2] or b"").startswith(mine)
            if freed and life.ran_in == where:
                life.over = True
            if what == "returns" and details[2] == life.message_id:
                life.over = life.lapsed = True  # a redelivery has no claim to its key
            killed = what == "killed" and life.runs_in == details[0]
            paused = what == "fault" and details[0].startswith("pause") and life.runs_in == where
            if life.runs_in is not None and (killed or paused or (what == "fault" and details[0] == "redis away")):
                # The last renewal was up to a third of the ttl earlier.
                life.runs_in, life.sign_at = None, max(life.sign_at, when - KEY_TTL.total_seconds() / 3)


def a_dropped_duplicates_work_is_done(stage: Stage) -> Iterator[str]:
    """D8, F6: with reschedule_once and until_executing, some run starts reading after each duplicate."""
    asked: dict[str, float] = {}
    for when, where, what, actor, *details in stage.events("sends", "sent"):
        if what == "sends":
            asked[where] = when
        elif details[2] is not None and actor in ("again", "executing"):
            since = asked[where]
            served = any(
                event[3] == actor and (event[4],) == tuple(details[0]) and event[0] >= since
                for event in stage.of("reads")
            )
            if not served and not stage.emptied_between(since, stage.world.now):
                yield f"the duplicate of {actor}{details[0]} sent at {since} was not served, nor was it later"


def a_completed_message_does_not_run_again(stage: Stage) -> Iterator[str]:
    """I1: unless Redis lost it, or a second delivery checked before (the first was paused or lost its mark).

    A process killed between the return and the record executes it once more; then it was not completed.
    """
    completed: dict[str, float] = {}
    asked: dict[tuple[str, str], float] = {}
    deliveries: set[bytes] = set()
    for when, where, what, *details in stage.events("completed", "key", "reads"):
        if what == "completed":
            completed.setdefault(details[0], when)
        elif what == "key":
            key, _, token = details
            # A delivery may set its mark again. It checked when it set it first.
            if key.startswith("sim:running:") and token is not None and token not in deliveries:
                deliveries.add(token)
                asked[where, token.decode().partition(":")[0]] = when
        elif details[2] in completed and not stage.emptied_between(completed[details[2]], when):
            if completed[details[2]] <= asked.get((where, details[2]), float(when)):
                yield f"{details[2]} of {details[0]} was executed again at {when} by {where}"


def a_message_runs_once_at_a_time(stage: Stage) -> Iterator[str]:
    """I2, and L1 for actors with a lease: two at once only if one was paused or Redis was unreachable."""
    if stage.redis.emptied_at or stage.struck("redis away", "pause before", "pause after", "pause in a transaction"):
        return
    running: dict[str, str] = {}  # message, or lease -> process
    kinds = ("reads", "returns", "fails", "killed", "interrupted")
    for when, where, what, *details in stage.events(*kinds):
        if what == "killed":
            running = {name: process for name, process in running.items() if process != details[0]}
            continue
        names = [details[2]] if ACTORS.get(details[0], {}).get("idempotent") else []
        names += [f"lease {details[0]}"] if details[0] in ("leased", "exclusive") else []
        for name in names:
            if what != "reads":
                running.pop(name, None)
                continue
            if name in running:
                yield f"{name} began at {when} in {where} while it ran in {running[name]}"
            running[name] = where


def no_message_is_lost(stage: Stage) -> Iterator[str]:
    """B1, R4: every enqueued message was executed, skipped for a reason, or is a dead letter."""
    if stage.redis.emptied_at:
        return  # the queues were lost
    ended = {event[5] for event in (*stage.of("returns"), *stage.of("recorded"))}
    worked = {event[3]: event[0] for event in stage.of("run ended") if event[6] in ("done", "partial")}
    # The run that took over must have done the work.
    ended |= {event[5] for event in stage.of("run ended") if worked.get(event[3], 0.0) >= event[0]}
    ended |= {event[4] for event in stage.of("dead letter")}
    ended |= {event[4] for event in stage.of("skipped") if "already_done" not in event[5]}
    # A failed tick is not retried beside another waiting retry (R2).
    ended |= {event[5] for event in stage.of("interrupted") if event[3] in SCHEDULED}
    queued = {event[4] for event in stage.of("queued")}
    ended |= {event[3] for event in stage.of("dropped") if event[5] in queued - {event[3]}}
    for message_id, actor in {(event[4], event[6]): None for event in stage.of("queued")}:
        if message_id not in ended:
            yield f"{message_id} of {actor} was enqueued and never ended"


def every_key_expires(stage: Stage) -> Iterator[str]:
    """D10: every key has a ttl, and there are no more deduplication keys than live messages."""
    for key in stage.redis.live_keys():
        if not key.startswith(b"sim:broker:") and stage.redis.expires_at(key) is None:
            yield f"{key!r} never expires"


def a_key_is_free_when_its_message_has_ended(stage: Stage) -> Iterator[str]:
    """D4: a key is free at once if the process lives and Redis answers one of three tries."""
    # A second delivery acknowledges a message that still runs in a paused process.
    stopped = {event[1] for event in stage.of("fault") if event[3].startswith("pause")}
    step_worker: dict[str, set[str]] = {}
    unanswered: Counter[str] = Counter()
    for when, where, what, *details in stage.events("queued", "delivered", "connection lost", "key outlives"):
        if what == "connection lost" and details[0] == "redis":
            unanswered[details[1].removeprefix("script ").partition(" ")[0]] += 1
        elif what in ("queued", "delivered"):
            step_worker.setdefault(details[1], set()).add(where)
        elif what == "key outlives" and unanswered[details[0]] < 3 and not step_worker[details[1]] & stopped:
            yield f"{details[0]} was held by {details[1]} at {when}, after {where} had acknowledged it"


def queues_are_bounded(stage: Stage) -> Iterator[str]:
    """F10: a message has few copies, whichever answers are lost and clocks differ."""
    copies = Counter(event[4] for event in stage.of("queued"))
    for message_id, number in copies.items():
        if number > 60:
            yield f"{message_id} was enqueued {number} times"


MESSAGES = (
    no_token_replaces_another_holders,
    at_most_one_message_of_a_key_is_live,
    a_dropped_duplicates_work_is_done,
    a_completed_message_does_not_run_again,
    a_message_runs_once_at_a_time,
    no_message_is_lost,
    every_key_expires,
    a_key_is_free_when_its_message_has_ended,
    queues_are_bounded,
)
