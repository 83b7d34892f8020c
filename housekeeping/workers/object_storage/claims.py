"""How completing an upload and deleting it as stale exclude each other.

Looking once more right before deleting is not enough: an upload may be completed between that look and the
store's answer. So the sweep *claims* an entry, in one script with its last look, and from then on `complete`
and `prepare` refuse it. The entry itself stays as it is, because other programs read it; the claim is a key
beside it. A claim whose object was not surely deleted is given up, but stays, for any later run to take over:
nobody knows whether the object is still there, so nobody may complete it.

A program that removes the field from the hash by its own ``HDEL`` asks nobody. Up to the claim that counts as
completed; after it, the object is lost, and `Claims.settle` says so.
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

#: How long a claim outlives the run that made it: many runs, so that the next one takes it over before that.
_KEPT: Final = timedelta(hours=24)

#: KEYS: the hash, then a claim for each entry. ARGV: token, ms a claim is kept, and how much of that is left when
#: its owner is taken for dead; the runs at work, or "unknown"; then field and value of each entry. Returns the places
#: of those now claimed, and the earlier runs in whose hands others are, where it is unknown whether they are at work.
#: The claim of one that is not is free: it looks before it begins a deletion, and commits nothing.
_CLAIM: Final = """
local function run(token) return tonumber(string.match(token, "^(%d+):")) end
local ours, unknown, at_work = run(ARGV[1]), ARGV[4] == "unknown", {}
for id in string.gmatch(ARGV[4], "%d+") do at_work[tonumber(id)] = true end
local fields, claimed, held = {}, {}, {}
for n = 1, #KEYS - 1 do fields[n] = ARGV[2 * n + 3] end
local holders = redis.call("mget", unpack(KEYS, 2))
local values = redis.call("hmget", KEYS[1], unpack(fields))
for n = 1, #fields do
  local holder = holders[n]
  local free = not holder or holder == "" or holder == ARGV[1]
  if not free then
    local theirs = run(holder)
    local earlier = ours and theirs and theirs < ours
    if earlier and unknown then held[#held + 1] = theirs end
    free = earlier and not unknown and not at_work[theirs] or redis.call("pttl", KEYS[n + 1]) < tonumber(ARGV[3])
  end
  if free and values[n] == ARGV[2 * n + 4] then
    redis.call("set", KEYS[n + 1], ARGV[1], "px", ARGV[2])
    claimed[#claimed + 1] = n - 1
  end
end
return {claimed, held}
"""
#: KEYS as above. ARGV: token, ms a claim is kept, "1" if it was asked before and the answer was lost; then field, value
#: and "1" if the object is gone, of each entry. Returns for each: 0 kept, 1 removed, 2 it was gone, 3 it was changed,
#: 4 the claim is no longer ours.
_SETTLE: Final = """
local fields, ends, over, removed = {}, {}, {}, {}
for n = 1, #KEYS - 1 do fields[n] = ARGV[3 * n + 1] end
local holders = redis.call("mget", unpack(KEYS, 2))
local values = redis.call("hmget", KEYS[1], unpack(fields))
for n = 1, #fields do
  local gone = ARGV[3 * n + 3] == "1"
  if gone and ARGV[3] == "1" and not holders[n] and not values[n] then
    ends[n] = 1 -- by the first try: another run would have left its claim, or taken this one for dead
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
#: KEYS: the hash, the claim. ARGV: field, value; empty: the time in Redis.
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
    """What became of entries whose object is gone.

    Attributes:
      removed: These are done with.
      lost: These were completed or prepared anew behind the claim's back, and why that is bad.
    """

    removed: list[Entry] = field(default_factory=list)
    lost: list[tuple[Entry, RecordChanged]] = field(default_factory=list)


class Claims:
    """The claims of one run.

    Parameters:
      lasts: After that time any other run may take its claims over, whatever the ledger says.
      run_id: The run's in the ledger; null: it has none, and takes over by time only.
      at_work: Asks for the runs that are; the claims of other runs before this one are taken over at once.
    """

    def __init__(
        self, lasts: timedelta, run_id: int | None = None, at_work: Callable[[], Collection[int]] = tuple
    ) -> None:
        self._token = uuid4().hex if run_id is None else f"{run_id}:{uuid4().hex}"
        self._at_work = at_work
        self._dead_below = _ms(_KEPT - lasts)
        self._claim: Any = shared_redis.get().register_script(_CLAIM)
        self._settle: Any = shared_redis.get().register_script(_SETTLE)

    def take(self, chosen: Sequence[Entry]) -> list[Entry]:
        """Those that are still there with the same value, and that no other run at work has claimed.

        One round trip; one more, and a question to the ledger, where it meets another run's claims.

        Raises:
          RedisUnavailable: Some may be claimed nevertheless, until this run has ended.
        """
        places, held = self._claimed(chosen, "unknown")
        if held:
            # Asked only now: a run claims when its row is committed, so that one at work is seen here.
            places, _ = self._claimed(chosen, " ".join(map(str, self._at_work())))
        return [chosen[place] for place in places]

    def _claimed(self, chosen: Sequence[Entry], at_work: str) -> tuple[list[int], list[int]]:
        words = [word for entry in chosen for word in (entry.field, entry.value)]
        terms = (self._token, _ms(_KEPT), self._dead_below, at_work)
        with translate_redis_errors():
            places, held = self._claim(keys=_keys(chosen), args=[*terms, *words])
        return places, held

    def settle(self, deleted: Sequence[Entry], kept: Sequence[Entry]) -> Ends:
        """Remove the entries whose objects are gone, if unchanged, and give up the others; one round trip.

        Raises:
          RedisUnavailable: The objects are gone; a later run finds them missing and removes their entries.
        """
        claimed = [*deleted, *kept]
        words: list[bytes] = []
        for place, entry in enumerate(claimed):
            words += (entry.field, entry.value, b"1" if place < len(deleted) else b"0")
        tries = itertools.count()

        def settle() -> Any:
            again = b"1" if next(tries) else b"0"
            return self._settle(keys=_keys(claimed), args=[self._token, _ms(_KEPT), again, *words])

        codes = retry_redis(settle)
        ends = Ends()
        for entry, code in zip(deleted, codes, strict=False):
            if code == _REMOVED:
                ends.removed.append(entry)
            elif code in (_GONE, _CHANGED):
                did = "completed" if code == _GONE else "prepared anew"
                ends.lost.append((entry, RecordChanged(f"{did} by another program while its object was deleted")))
        return ends


def prepare(field: bytes, value: int | None) -> None:
    """Write an entry, with the time in Redis unless a value is given.

    Raises:
      UploadBeingDeleted: When the entry that is there is claimed.
      RedisUnavailable: When Redis does not answer.
    """
    if not _run(_PREPARE, field, "" if value is None else str(value)):
        raise UploadBeingDeleted(f"the stale upload {field.decode(errors='replace')!r} is just being deleted")


def complete(field: bytes) -> bool:
    """Remove an entry unless it is claimed; whether it was there and is removed.

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


def _ms(length: timedelta) -> int:
    return int(length.total_seconds() * 1000)
