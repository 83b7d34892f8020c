"""Lua scripts of `tick_store`, which claim and record ticks."""

from __future__ import annotations

from typing import Final

#: A recorded tick is a member "tick:token:before" of a sorted set, with the tick as its score. `before` is the recorded
#: tick before it at that time, or empty. Ticks between the two were counted as missed. Older releases wrote
#: "tick:token".
_PARTS: Final = """
local function parts(member)
    local _, _, tick, token, before = string.find(member, "^(%d+):([^:]*):?(%d*)$")
    return tonumber(tick), token, tonumber(before)
end
"""

#: Claim a tick. KEYS: the actor's recorded ticks, its claim. Returns whether the caller may send the tick. Repeating it
#: with the same token changes nothing.
CLAIM: Final = """
local tick, token = ARGV[1], ARGV[2]
-- The last token of this process, which may send again what it failed to send.
local own_token = ARGV[3]
local previous_tick = ARGV[4]
local max_remembered, ttl, claim_ttl = tonumber(ARGV[5]), ARGV[6], ARGV[7]

local claim = tick .. ":" .. token
if redis.call("zcount", KEYS[1], tick, tick) > 0 then return 0 end
local held = redis.call("get", KEYS[2])
if held and held ~= claim and held ~= tick .. ":" .. own_token
    and string.find(held, tick .. ":", 1, true) == 1 then return 0 end
local known = redis.call("zcard", KEYS[1])
-- Whether a tick older than all remembered ones was sent is unknown.
if known >= max_remembered and redis.call("zcount", KEYS[1], "-inf", tick) == 0 then return 0 end
-- A new actor's memory begins with the tick before, so that this one counts as missed if it is not sent.
if known == 0 then
    redis.call("zadd", KEYS[1], previous_tick, previous_tick .. "::")
    redis.call("pexpire", KEYS[1], ttl)
end
redis.call("set", KEYS[2], claim, "px", claim_ttl)
return 1
"""

#: Record a tick. KEYS: the actor's recorded ticks, its claim, the notes. Returns whether the tick is this token's, and
#: whether a note was written.
#:
#: What must reach the ledger is noted in the same script, so that it survives the process and a database outage.
RECORD: Final = (
    _PARTS
    + """
-- `how`: see `tick_store.Settling`.
local tick, token, how = tonumber(ARGV[1]), ARGV[2], ARGV[3]
-- The last tick that is missed if there is a gap before this one.
local last_missed = ARGV[4]
local max_remembered, ttl = tonumber(ARGV[5]), ARGV[6]
-- "" as the actor: write no notes; "" as the row: none for the ledger.
local actor, row, max_notes = ARGV[7], ARGV[8], tonumber(ARGV[9])

local there = redis.call("zrangebyscore", KEYS[1], tick, tick)[1]
if there then
    local _, whose = parts(there)
    return {(whose == token or whose == "*") and 1 or 0, 0}
end
local known = redis.call("zcard", KEYS[1])
if known == 0 and how == "retried" then return {1, 0} end
local before = redis.call("zrevrangebyscore", KEYS[1], "(" .. ARGV[1], "-inf", "limit", 0, 1)[1]
if not before and known >= max_remembered then
    return {(how == "begun" or how == "retried") and 1 or 0, 0}
end
-- Passed: a later tick was recorded and counted this one as missed.
local later, passed = redis.call("zrangebyscore", KEYS[1], "(" .. ARGV[1], "+inf", "limit", 0, 1)[1], false
if later then
    local _, _, since = parts(later)
    passed = since ~= nil and since < tick
end
local claimed = redis.call("get", KEYS[2]) == ARGV[1] .. ":" .. token
if passed and how ~= "missed" and not claimed then return {0, 0} end
before = before and parts(before)
redis.call("zadd", KEYS[1], tick, ARGV[1] .. ":" .. token .. ":" .. (before and string.format("%d", before) or ""))
redis.call("zremrangebyrank", KEYS[1], 0, -max_remembered - 1)
redis.call("pexpire", KEYS[1], ttl)
if claimed then redis.call("del", KEYS[2]) end
if actor == "" or redis.call("hlen", KEYS[3]) >= max_notes then return {1, 0} end
local noted = 0
local function note(kind, at, value)
    redis.call("hset", KEYS[3], kind .. ":" .. at .. ":" .. actor, value)
    noted = 1
end
if passed and how ~= "missed" then
    note("fired", ARGV[1], "1")
elseif before and before < tonumber(last_missed) and not passed then
    note("gap", last_missed, string.format("%d", before))
end
if row ~= "" then note("row." .. token, ARGV[1], row) end
if noted == 1 then redis.call("pexpire", KEYS[3], ttl) end
return {1, noted}
"""
)
