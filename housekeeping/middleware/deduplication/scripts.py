"""Lua scripts of deduplication keys. Each change of a key is one script, so it is atomic and takes one round trip.

A key is a hash with these fields:

- ``id``: the message that holds the key.
- ``state``: ``reserved`` (its sender has not enqueued it yet), ``waiting`` or ``running``.
- ``run``: the token of the delivery that runs.
- ``again``: set if a rerun after this run is requested.
- ``queued``: the id in Redis of the message's copy, where the queue is on the same Redis.
- ``bodies``: the Redis key of the hash with that copy; empty for a delayed copy. The copy is there until the message is
  acknowledged, after its key was freed. A key whose copy is gone has outlived its message, for example in a failover
  of Redis, and the next message takes it.
- ``mark``: the Redis key of the mark that a running message renews. A second delivery runs without a copy.
- ``tick``: token of the waiting copy's claim, for a message of a tick. Such a message may be in the queue twice.
- ``retry``: set when the message waits for a retry that a new message may supersede: the TTL in ms that the key has
  left when the retry is due.
- ``next``: the message that will supersede the retry; its sender has not enqueued it yet.
- ``next_left``: that reservation has expired once the key's TTL in ms falls to this value.

KEYS[1] is always the key. CLAIM, RETAIN and RELEASE begin with the same ARGV: message id, TTL in ms, state. When CLAIM
or RETAIN returns the id of a holder, the message must not be enqueued.
"""

from __future__ import annotations

from typing import Final

#: Functions for superseded retries. The mark of a superseded message is a Redis key of its own, because the
#: deduplication key may be free by the time the retry is due.
_SUPERSEDED: Final = """
local function mark_of(message_id)
    return string.gsub(KEYS[1], ":dedup:", ":superseded:", 1) .. ":" .. message_id
end
local function retry_due_in()
    local ttl_after_due = redis.call("hget", KEYS[1], "retry")
    return ttl_after_due and redis.call("pttl", KEYS[1]) - ttl_after_due or -1
end
local function mark_superseded(holder, by)
    redis.call("set", mark_of(holder), by, "px", math.max(redis.call("pttl", KEYS[1]), 1))
end
"""
#: Take the key unless another message holds it. Returns the holder's id, or "" when the message may be enqueued.
CLAIM: Final = (
    _SUPERSEDED
    + """
local message_id, ttl, state = ARGV[1], ARGV[2], ARGV[3]
local ask_for_rerun, never_drop = ARGV[4] == "1", ARGV[5] == "1"
-- The ended run whose key this message takes over as its rerun; "": none.
local ended_message, ended_run = ARGV[6], ARGV[7]
-- The claim of the message's tick; "": none.
local tick = ARGV[8]
-- Supersede a holder whose retry is due later than this, in ms; "": never.
local supersede_after = ARGV[9]
-- The message's database position and for how long to remember it in ms; nil: none.
local position, position_ttl = ARGV[10], ARGV[11]

local holder = redis.call("hget", KEYS[1], "id")
local function holder_has_ended()
    local its = redis.call("hmget", KEYS[1], "queued", "bodies", "mark")
    if not its[1] or (its[2] or "") == "" or redis.call("hexists", its[2], its[1]) == 1 then return false end
    return not its[3] or redis.call("exists", its[3]) == 0
end
if holder and holder ~= message_id and holder_has_ended() then
    redis.call("del", KEYS[1])
    holder = false
end
if holder and holder == ended_message and redis.call("hget", KEYS[1], "run") == ended_run then
    -- A reservation takes over nothing yet: the ended run owes the rerun until its message is in the queue.
    if state == "reserved" then return "" end
    redis.call("del", KEYS[1])
    holder = false
end
local running = redis.call("hget", KEYS[1], "state") == "running"
if holder and holder ~= message_id and supersede_after ~= "" and retry_due_in() > tonumber(supersede_after) then
    if state == "reserved" then
        -- A reservation supersedes nothing yet, so that the retry is not lost if the sender dies.
        local left, next = redis.call("pttl", KEYS[1]), redis.call("hmget", KEYS[1], "next", "next_left")
        if not next[1] or next[1] == message_id or left <= tonumber(next[2]) then
            redis.call("hset", KEYS[1], "next", message_id, "next_left", left - ttl)
            return ""
        end
        holder = next[1]
    else
        mark_superseded(holder, message_id)
        redis.call("del", KEYS[1])
        holder = false
    end
end
if holder and holder ~= message_id then
    if never_drop then return "" end
    if ask_for_rerun and running then redis.call("hset", KEYS[1], "again", "1") end
    if position then
        -- The holder must read data as fresh as this duplicate's sender saw.
        local newest = string.gsub(KEYS[1], ":dedup:", ":position:", 1)
        if position >= (redis.call("get", newest) or "") then
            redis.call("set", newest, position, "px", position_ttl)
        end
    end
    return holder
end
if not running then
    redis.call("hset", KEYS[1], "id", message_id, "state", state)
    if tick ~= "" then redis.call("hset", KEYS[1], "tick", tick) end
    redis.call("pexpire", KEYS[1], ttl)
end
return ""
"""
)
#: Keep the key for a message that goes back to the queue. Returns "", or the message's own id if another delivery has
#: completed it and the retry has nothing to do.
RETAIN: Final = """
local message_id, ttl, state = ARGV[1], ARGV[2], ARGV[3]
-- The token of the run; "": it did not run.
local run = ARGV[4]
-- Whether a requested rerun is kept until after the next run. A failed run starts over, so it needs no
-- rerun. A requeued run resumes where it stopped and still needs it.
local still_wanted = ARGV[5] == "1"
-- The claim of the message's tick; "": none.
local tick = ARGV[6]
-- The TTL in ms after the retry's due time, if a new message may supersede it until then; "": it may not.
local ttl_after_due = ARGV[7]
-- The Redis key of the message's completion, for a retry; "": none.
local completion = ARGV[8]

local holder = redis.call("hget", KEYS[1], "id")
if holder and (holder ~= message_id or (redis.call("hget", KEYS[1], "run") or run) ~= run) then return "" end
if not holder and run == "" then return "" end
if not holder and completion ~= "" and redis.call("exists", completion) == 1 then return message_id end
local again = still_wanted and redis.call("hget", KEYS[1], "again")
redis.call("del", KEYS[1])
redis.call("hset", KEYS[1], "id", message_id, "state", state)
if again then redis.call("hset", KEYS[1], "again", "1") end
if tick ~= "" then redis.call("hset", KEYS[1], "tick", tick) end
if ttl_after_due ~= "" then redis.call("hset", KEYS[1], "retry", ttl_after_due) end
redis.call("pexpire", KEYS[1], ttl)
return ""
"""
#: Free the key. Returns 0: done; 1: a rerun is wanted, so the key stays held until the rerun's message takes it over;
#: 2: the run had lost the key, so whether a rerun is wanted is unknown. Repeated after a lost answer it returns the
#: same, or 2.
RELEASE: Final = """
local message_id, ttl = ARGV[1], ARGV[2]
-- The token of the run; "": it did not run.
local run = ARGV[4]
-- Whether to free the key even if a rerun is wanted.
local free_anyway = ARGV[5] == "1"
-- For a copy that did not run, the claim of its tick: it must not free the key of another, waiting copy. "": none.
local tick = ARGV[6]

if redis.call("hget", KEYS[1], "id") ~= message_id then return run ~= "" and 2 or 0 end
if (redis.call("hget", KEYS[1], "run") or "") ~= run then return 0 end
if tick ~= "" and (redis.call("hget", KEYS[1], "tick") or tick) ~= tick then return 0 end
if not free_anyway and redis.call("hget", KEYS[1], "again") then
    redis.call("pexpire", KEYS[1], ttl)
    return 1
end
redis.call("del", KEYS[1])
return 0
"""
#: Turn a reservation into a waiting message, now that the message is in the queue. A worker may have started it
#: already; then there is nothing to confirm.
CONFIRM: Final = (
    _SUPERSEDED
    + """
local message_id, ttl = ARGV[1], ARGV[2]
-- The ended run whose key the message takes over as its rerun; "": none.
local ended_message, ended_run = ARGV[3], ARGV[4]

local function take_over()
    redis.call("del", KEYS[1])
    redis.call("hset", KEYS[1], "id", message_id, "state", "waiting")
    redis.call("pexpire", KEYS[1], ttl)
end
local holder = redis.call("hget", KEYS[1], "id")
if redis.call("hget", KEYS[1], "next") == message_id then
    mark_superseded(holder, message_id)
    return take_over()
end
local run = redis.call("hget", KEYS[1], "run")
if run and run == ended_run and holder == ended_message then return take_over() end
if holder ~= message_id then return end
if redis.call("hget", KEYS[1], "state") ~= "reserved" then return end
redis.call("hset", KEYS[1], "state", "waiting")
redis.call("pexpire", KEYS[1], ttl)
"""
)
#: Begin a run. Returns "ours"; the other message's state; or "superseded:" and the id of the superseding message.
START: Final = (
    _SUPERSEDED
    + """
-- A TTL of 0 frees the key at the start.
local message_id, ttl, run = ARGV[1], ARGV[2], ARGV[3]
-- For how long in ms to remember a superseded message that was dropped, because it may be delivered again.
local drop_remembered = ARGV[4]
-- The id in Redis of the delivered copy, the Redis key of its queue's bodies, and that of the running mark; "": none,
-- because the queue is not on the same Redis.
local copy = ARGV[5] ~= "" and {"queued", ARGV[5], "bodies", ARGV[6], "mark", ARGV[7]} or {}

local holder = redis.call("hget", KEYS[1], "id")
if holder ~= message_id and ttl ~= "0" then
    local by = redis.call("get", mark_of(message_id))
    if by then
        redis.call("pexpire", mark_of(message_id), drop_remembered)
        return "superseded:" .. by
    end
    -- A superseding message may start before its sender has confirmed it.
    if holder and redis.call("hget", KEYS[1], "next") == message_id then
        mark_superseded(holder, message_id)
        holder = false
    end
end
if holder and holder ~= message_id then return redis.call("hget", KEYS[1], "state") end
local again = redis.call("hget", KEYS[1], "again")
redis.call("del", KEYS[1])
if ttl == "0" then return "ours" end
redis.call("hset", KEYS[1], "id", message_id, "state", "running", "run", run, unpack(copy))
if again then redis.call("hset", KEYS[1], "again", "1") end
redis.call("pexpire", KEYS[1], ttl)
return "ours"
"""
)
#: Reset the key's TTL. ARGV: the token of the run, the TTL in ms. Returns 0 when the run no longer holds the key.
RENEW: Final = """
if redis.call("hget", KEYS[1], "run") ~= ARGV[1] then return 0 end
return redis.call("pexpire", KEYS[1], ARGV[2])
"""
