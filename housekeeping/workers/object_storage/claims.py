"""Claims on stale entries: they keep an upload from being completed while it is being deleted.

A second look right before the deletion would not be enough: the upload may be completed between that look and the
store's answer. Instead, the sweep claims an entry in the same script that reads it for the last time. From then on
`complete` and `prepare` refuse it. The entry itself does not change, because other programs read it; the claim is a
key beside it. A claim whose object may not be deleted is given up but kept, so that any later run can take it over:
the object may be gone, so no program may complete the upload.

A program that removes the field by its own ``HDEL`` bypasses this. Before the claim that counts as completed. After
the claim the object is lost, and `Claims.settle` reports it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

from housekeeping.sweeps import RecordChanged, UploadBeingDeleted, retry_redis, shared_redis, translate_redis_errors
from housekeeping.workers.object_storage import pending_entry
from housekeeping.workers.object_storage.pending_entry import Entry

#: Time to live of a claim: many times the interval between runs, so that a later run takes it over before it expires.
_KEPT: Final = timedelta(hours=24)
_MILLISECOND: Final = timedelta(milliseconds=1)

#: Claims entries that still have the same value.
#: KEYS: the hash, then the claim of each entry. ARGV: token; ttl of a claim in ms; a claim with less ms to live than
#: this counts as abandoned; the ids of the active runs, or "unknown"; then field and value of each entry.
#: Returns the indexes of the entries that are now claimed, and the earlier runs that hold other claims if the active
#: runs are unknown. A claim of an inactive run may be taken: such a run checks its claims before it deletes anything.
_CLAIM: Final = """
local function run(token) return tonumber(string.match(token, "^(%d+):")) end
local own_run, unknown, active = run(ARGV[1]), ARGV[4] == "unknown", {}
for id in string.gmatch(ARGV[4], "%d+") do active[tonumber(id)] = true end
local fields, claimed, held = {}, {}, {}
for n = 1, #KEYS - 1 do fields[n] = ARGV[2 * n + 3] end
local holders = redis.call("mget", unpack(KEYS, 2))
local values = redis.call("hmget", KEYS[1], unpack(fields))
for n = 1, #fields do
  local holder = holders[n]
  local free = not holder or holder == "" or holder == ARGV[1]
  if not free then
    local other_run = run(holder)
    local earlier = own_run and other_run and other_run < own_run
    if earlier and unknown then held[#held + 1] = other_run end
    free = earlier and not unknown and not active[other_run] or redis.call("pttl", KEYS[n + 1]) < tonumber(ARGV[3])
  end
  if free and values[n] == ARGV[2 * n + 4] then
    redis.call("set", KEYS[n + 1], ARGV[1], "px", ARGV[2])
    claimed[#claimed + 1] = n - 1
  end
end
return {claimed, held}
"""
#: Removes the entries whose objects are gone, and gives up the claims of the others.
#: KEYS as above. ARGV: token; ttl of a claim in ms; "1" if this repeats a call whose answer was lost; then field, value
#: and "1" if the object is gone, for each entry.
#: Returns for each entry: 0 kept, 1 removed, 2 already gone, 3 changed, 4 claimed by another run.
_SETTLE: Final = """
local fields, ends, over, removed = {}, {}, {}, {}
for n = 1, #KEYS - 1 do fields[n] = ARGV[3 * n + 1] end
local holders = redis.call("mget", unpack(KEYS, 2))
local values = redis.call("hmget", KEYS[1], unpack(fields))
for n = 1, #fields do
  local gone = ARGV[3 * n + 3] == "1"
  if gone and ARGV[3] == "1" and not holders[n] and not values[n] then
    ends[n] = 1 -- removed by the first attempt: another run would have left a claim or this entry
  elseif holders[n] ~= ARGV[1] then
    ends[n] = 4
  elseif not gone then
    redis.call("set", KEYS[n + 1], "", "px", ARGV[2])
    ends[n] = 0
  else
    over[#over + 1] = KEYS[n + 1]
    if values[n] == ARGV[3 * n + 2] then
      removed[#removed + 1] = fields[n]
      ends[n] = 1
    else
      ends[n] = values[n] and 3 or 2
    end
  end
end
if #over > 0 then redis.call("del", unpack(over)) end
if #removed > 0 then redis.call("hdel", KEYS[1], unpack(removed)) end
return ends
"""
#: KEYS: the hash, the claim. ARGV: field.
_COMPLETE: Final = """
if redis.call("exists", KEYS[2]) == 1 then return 0 end
return redis.call("hdel", KEYS[1], ARGV[1])
"""
#: KEYS: the hash, the claim. ARGV: field; value, or "" for the time of the Redis server.
_PREPARE: Final = """
if redis.call("exists", KEYS[2]) == 1 then return 0 end
local value = ARGV[2]
if value == "" then value = redis.call("time")[1] end
redis.call("hset", KEYS[1], ARGV[1], value)
return 1
"""
_REMOVED, _GONE, _CHANGED = 1, 2, 3


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
        self._dead_below = (_KEPT - lasts) // _MILLISECOND
        self._claim: Any = shared_redis.get().register_script(_CLAIM)
        self._settle: Any = shared_redis.get().register_script(_SETTLE)

    def take(self, chosen: Sequence[Entry]) -> list[Entry]:
        """Claim the entries that still have the same value and that no other active run has claimed; return them.

        One round trip. If another run's claims are found: a second one, and a query for the active runs.

        Raises:
          RedisUnavailable: Some entries may be claimed nevertheless, until this run has ended.
        """
        indexes, held = self._claimed(chosen, "unknown")
        if held:
            # Only now: a run commits its row before it claims, so every active holder is in the ledger.
            indexes, _ = self._claimed(chosen, " ".join(map(str, self._at_work())))
        return [chosen[index] for index in indexes]

    def _claimed(self, chosen: Sequence[Entry], at_work: str) -> tuple[list[int], list[int]]:
        words = [word for entry in chosen for word in (entry.field, entry.value)]
        terms = (self._token, _KEPT // _MILLISECOND, self._dead_below, at_work)
        with translate_redis_errors():
            indexes, held = self._claim(keys=_keys(chosen), args=[*terms, *words])
        return indexes, held

    def settle(self, deleted: Sequence[Entry], kept: Sequence[Entry]) -> Ends:
        """Remove the entries whose objects are gone, if unchanged, and give up the other claims; one round trip.

        Raises:
          RedisUnavailable: The objects are gone. A later run finds them missing and removes their entries.
        """
        claimed = [*deleted, *kept]
        words: list[bytes] = []
        for index, entry in enumerate(claimed):
            words += (entry.field, entry.value, b"1" if index < len(deleted) else b"0")
        tries = itertools.count()

        def settle() -> Any:
            again = b"1" if next(tries) else b"0"
            return self._settle(keys=_keys(claimed), args=[self._token, _KEPT // _MILLISECOND, again, *words])

        codes = retry_redis(settle)
        ends = Ends()
        for entry, code in zip(deleted, codes, strict=False):
            if code == _REMOVED:
                ends.removed.append(entry)
            elif code in (_GONE, _CHANGED):
                did = "completed" if code == _GONE else "prepared again"
                ends.lost.append((entry, RecordChanged(f"{did} by another program while its object was deleted")))
        return ends


def prepare(field: bytes, value: int | None) -> None:
    """Write an entry, with the time of the Redis server unless a value is given.

    Raises:
      UploadBeingDeleted: When the existing entry is claimed.
      RedisUnavailable: When Redis does not answer.
    """
    if not _run(_PREPARE, field, "" if value is None else str(value)):
        raise UploadBeingDeleted(
            f"the stale upload {field.decode(errors='replace')!r} is being deleted; use another path"
        )


def complete(field: bytes) -> bool:
    """Remove an entry unless it is claimed; return whether it existed and was removed.

    Raises:
      RedisUnavailable: When Redis does not answer; it may have been removed.
    """
    return bool(_run(_COMPLETE, field))


def _run(script: str, field: bytes, *values: str) -> Any:
    with translate_redis_errors():
        return shared_redis.get().eval(script, 2, pending_entry.KEY, _claim_key(field), field, *values)


def _keys(chosen: Sequence[Entry]) -> list[bytes | str]:
    return [pending_entry.KEY, *(_claim_key(entry.field) for entry in chosen)]


def _claim_key(field: bytes) -> bytes:
    return f"{shared_redis.namespace}:upload_claim:".encode() + field
