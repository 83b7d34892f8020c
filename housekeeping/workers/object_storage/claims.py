"""Claims on stale entries: they keep an upload from being completed while it is being deleted.

A second look right before the deletion would not be enough: the upload may be completed between that look and the
store's answer. Instead, the sweep claims an entry in the same script that reads it for the last time. From then on
`complete` and `prepare` refuse it.

The entry itself does not change, because other programs read it. The claim is a field of the same name in another
hash. Its value ``<ms>:<token>`` is the time at which it expires and the token of its run. If it is unknown whether the
object was deleted, the claim is given up: it loses its token but stays. Any later run can take it over, and no program
can complete the upload.

Behind Sentinel, claims and calls of applications return when a replica has them. A failover to it then keeps them.

A program that removes the field by its own ``HDEL`` bypasses this. Before the claim that counts as completed. After
the claim the object is lost, and `Claims.finish` reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

from housekeeping.sweeps import (
    RecordChanged,
    UploadBeingDeleted,
    retry_redis,
    run_replicated,
    shared_redis,
    translate_redis_errors,
)
from housekeeping.workers.object_storage import pending_entry
from housekeeping.workers.object_storage.pending_entry import Entry

#: Time to live of a claim: many times the interval between runs, so that a later run takes it over before it expires.
KEPT: Final = timedelta(hours=24)
_MILLISECOND: Final = timedelta(milliseconds=1)

#: KEYS of every script: the hash of entries, the hash of claims. Claims have no TTL of their own, so all scripts
#: compare their times.
_NOW: Final = """
local time = redis.call("time")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
#: ARGV: token; ttl of a claim in ms; a claim with less ms to live than this counts as abandoned; the ids of the active
#: runs, or "unknown"; then field and value of each entry.
#: Claims the entries that still have the same value. Returns their indexes, and the earlier runs that hold other
#: claims if the active runs are unknown. A claim of an inactive run may be taken: such a run checks its claims before
#: it deletes anything.
_TAKE: Final = (
    _NOW
    + """
local function run(token) return tonumber(string.match(token, "^(%d+):")) end
local own_run, unknown, active = run(ARGV[1]), ARGV[4] == "unknown", {}
for id in string.gmatch(ARGV[4], "%d+") do active[tonumber(id)] = true end
local fields = {}
for n = 5, #ARGV, 2 do fields[#fields + 1] = ARGV[n] end
local claims = redis.call("hmget", KEYS[2], unpack(fields))
local values = redis.call("hmget", KEYS[1], unpack(fields))
local claim = string.format("%.0f:%s", now + ARGV[2], ARGV[1])
local claimed, held, written = {}, {}, {}
for n = 1, #fields do
  local free = true
  if claims[n] then
    local expires, holder = string.match(claims[n], "^(%d+):(.*)$")
    free = holder == "" or holder == ARGV[1]
    if not free then
      local earlier = own_run and run(holder) and run(holder) < own_run
      if earlier and unknown then held[#held + 1] = run(holder) end
      free = earlier and not unknown and not active[run(holder)] or expires - now < tonumber(ARGV[3])
    end
  end
  if free and values[n] == ARGV[2 * n + 4] then
    claimed[#claimed + 1] = n - 1
    written[#written + 1] = fields[n]
    written[#written + 1] = claim
  end
end
if #claimed > 0 then
  redis.call("hset", KEYS[2], unpack(written))
  redis.call("pexpire", KEYS[2], ARGV[2])
end
return {claimed, held}
"""
)
#: ARGV: token; ttl of a claim in ms; "1" if this repeats a call whose answer was lost; the number of entries whose
#: objects are gone; then field and value of each entry, beginning with those entries.
#: Removes the entries whose objects are gone with their claims, and gives up the claims of the others. Returns for the
#: former: 1 removed, 2 already gone, 3 changed, 4 claimed by another run.
_FINISH: Final = (
    _NOW
    + """
local again, gone = ARGV[3] == "1", tonumber(ARGV[4])
local fields = {}
for n = 5, #ARGV, 2 do fields[#fields + 1] = ARGV[n] end
local claims = redis.call("hmget", KEYS[2], unpack(fields))
local values = redis.call("hmget", KEYS[1], unpack(fields))
local given_up = string.format("%.0f:", now + ARGV[2])
local ends, over, removed, kept = {}, {}, {}, {}
for n = 1, #fields do
  if n <= gone and again and not claims[n] and not values[n] then
    ends[n] = 1 -- removed by the first attempt: another run would have left a claim or this entry
  elseif not claims[n] or string.match(claims[n], ":(.*)$") ~= ARGV[1] then
    ends[n] = 4
  elseif n > gone then
    kept[#kept + 1] = fields[n]
    kept[#kept + 1] = given_up
  else
    over[#over + 1] = fields[n]
    if values[n] == ARGV[2 * n + 4] then
      removed[#removed + 1] = fields[n]
      ends[n] = 1
    else
      ends[n] = values[n] and 3 or 2
    end
  end
end
if #kept > 0 then
  redis.call("hset", KEYS[2], unpack(kept))
  redis.call("pexpire", KEYS[2], ARGV[2])
end
if #over > 0 then redis.call("hdel", KEYS[2], unpack(over)) end
if #removed > 0 then redis.call("hdel", KEYS[1], unpack(removed)) end
return {unpack(ends, 1, gone)}
"""
)
#: ARGV: cursor, entries per call. Removes a part of the expired claims and returns the next cursor.
_DROP_EXPIRED: Final = (
    _NOW
    + """
local found, expired = redis.call("hscan", KEYS[2], ARGV[1], "count", ARGV[2]), {}
for n = 1, #found[2], 2 do
  if tonumber(string.match(found[2][n + 1], "^%d+")) <= now then expired[#expired + 1] = found[2][n] end
end
if #expired > 0 then redis.call("hdel", KEYS[2], unpack(expired)) end
return found[1]
"""
)
#: ARGV: the field. Returns 0 from the script if the entry is claimed.
_REFUSE_CLAIMED: Final = (
    _NOW
    + """
local claim = redis.call("hget", KEYS[2], ARGV[1])
if claim and tonumber(string.match(claim, "^%d+")) > now then return 0 end
"""
)
_COMPLETE: Final = _REFUSE_CLAIMED + 'return redis.call("hdel", KEYS[1], ARGV[1])'
#: ARGV: also the value, or "" for the time of the Redis server.
_PREPARE: Final = (
    _REFUSE_CLAIMED + 'redis.call("hset", KEYS[1], ARGV[1], ARGV[2] == "" and time[1] or ARGV[2]) return 1'
)

_REMOVED, _GONE, _CHANGED = 1, 2, 3
_PAGE: Final = 1000  # claims per script that looks for expired ones


@dataclass(slots=True)
class Ends:
    """Results for entries whose object is gone.

    Attributes:
      removed: The entries that were removed.
      lost: Entries that another program completed or prepared again despite the claim, each with the error.
    """

    removed: list[Entry] = field(default_factory=list)
    lost: list[tuple[Entry, RecordChanged]] = field(default_factory=list)


class Claims:
    """Claims of one run.

    Parameters:
      lasts: After this time any other run may take the claims over, whatever the ledger contains.
      run_id: The run's id in the ledger. None takes over claims by their age only.
      at_work: Returns the active runs. Claims of other earlier runs are taken over at once.
    """

    def __init__(
        self, lasts: timedelta, run_id: int | None = None, at_work: Callable[[], Collection[int]] = tuple
    ) -> None:
        self._token = uuid4().hex if run_id is None else f"{run_id}:{uuid4().hex}"
        self._at_work = at_work
        self._abandoned_below = (KEPT - lasts) // _MILLISECOND
        self._take: Any = shared_redis.get().register_script(_TAKE)
        self._finish: Any = shared_redis.get().register_script(_FINISH)

    def take(self, chosen: Sequence[Entry]) -> list[Entry]:
        """Claim the entries that still have the same value and that no other active run has claimed; return them.

        One round trip. If another run's claims are found: a second one, and a query for the active runs.

        Raises:
          RedisUnavailable: Some entries may be claimed nevertheless, until this run has ended.
        """
        words = _words(chosen)
        indexes, held = self._claimed(words, "unknown")
        if held:
            # Only now: a run commits its row before it claims, so every active holder is in the ledger.
            indexes, _ = self._claimed(words, " ".join(map(str, self._at_work())))
        return [chosen[index] for index in indexes]

    def _claimed(self, words: Sequence[bytes], at_work: str) -> tuple[list[int], list[int]]:
        terms = (self._token, KEPT // _MILLISECOND, self._abandoned_below, at_work)
        with translate_redis_errors():
            indexes, held = run_replicated(
                shared_redis.get(), lambda client: self._take(keys=_keys(), args=[*terms, *words], client=client)
            )
        return indexes, held

    def finish(self, deleted: Sequence[Entry], kept: Sequence[Entry]) -> Ends:
        """Remove the entries whose objects are gone, if unchanged, and give up the other claims; one round trip.

        Raises:
          RedisUnavailable: The objects are gone. A later run finds them missing and removes their entries.
        """
        words = [*_words(deleted), *_words(kept)]
        again = 0

        def finish() -> Any:
            nonlocal again
            terms = (self._token, KEPT // _MILLISECOND, again, len(deleted))
            again = 1
            return self._finish(keys=_keys(), args=[*terms, *words])

        ends = Ends()
        for entry, code in zip(deleted, retry_redis(finish), strict=True):
            if code == _REMOVED:
                ends.removed.append(entry)
            elif code in (_GONE, _CHANGED):
                did = "completed" if code == _GONE else "prepared again"
                ends.lost.append((entry, RecordChanged(f"{did} by another program while its object was deleted")))
        return ends


def drop_expired() -> None:
    """Remove the claims that have expired. Only claims whose entry another program removed can expire.

    Raises:
      RedisUnavailable: When Redis does not answer.
    """
    cursor = int(_run(_DROP_EXPIRED, 0, _PAGE))
    while cursor:
        cursor = int(_run(_DROP_EXPIRED, cursor, _PAGE))


def prepare(field: bytes, value: int | None) -> None:
    """Write an entry, with the time of the Redis server unless a value is given.

    Raises:
      UploadBeingDeleted: When the existing entry is claimed.
      RedisUnavailable: When Redis does not answer.
    """
    if not _run(_PREPARE, field, "" if value is None else value):
        raise UploadBeingDeleted(
            f"the stale upload {field.decode(errors='replace')!r} is being deleted; use another path"
        )


def complete(field: bytes) -> bool:
    """Remove an entry unless it is claimed; return whether it existed and was removed.

    Raises:
      RedisUnavailable: When Redis does not answer; it may have been removed.
    """
    return bool(_run(_COMPLETE, field))


def _run(script: str, *arguments: bytes | str | int) -> Any:
    with translate_redis_errors():
        return run_replicated(shared_redis.get(), lambda client: client.eval(script, 2, *_keys(), *arguments))


def _keys() -> tuple[str, str]:
    return pending_entry.KEY, f"{shared_redis.namespace}:upload_claims"


def _words(entries: Sequence[Entry]) -> list[bytes]:
    return [word for entry in entries for word in (entry.field, entry.value)]
