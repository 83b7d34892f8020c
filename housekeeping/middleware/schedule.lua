--- parts
-- A recorded tick is a member "tick:token:before" of a sorted set, with the tick as its score. `before` is the recorded
-- tick before it at that time, or empty. Ticks between the two were counted as missed.
local function parts(member)
    local _, _, tick, token, before = string.find(member, "^(%d+):([^:]*):(%d*)$")
    return tonumber(tick), token, tonumber(before)
end

--- claim
-- Claim a tick. KEYS: the actor's recorded ticks, its claim. Returns whether the caller may send the tick. Repeating it
-- with the same token changes nothing.
-- own_token: the last token of this process, which may send again what it failed to send; nil: none.
-- previous: the tick before. most: how many ticks are remembered. ttl, claim_ttl: in ms.
local tick, token = given.tick, given.token

local claim = tick .. ":" .. token
if redis.call("zcount", KEYS[1], tick, tick) > 0 then return 0 end
local held = redis.call("get", KEYS[2])
if held and held ~= claim and held ~= tick .. ":" .. (given.own_token or "")
    and string.find(held, tick .. ":", 1, true) == 1 then return 0 end
local known = redis.call("zcard", KEYS[1])
-- Whether a tick older than all remembered ones was sent is unknown.
if known >= given.most and redis.call("zcount", KEYS[1], "-inf", tick) == 0 then return 0 end
-- A new actor's memory begins with the tick before, so that this one counts as missed if it is not sent.
if known == 0 then
    redis.call("zadd", KEYS[1], given.previous, given.previous .. "::")
    redis.call("pexpire", KEYS[1], given.ttl)
end
redis.call("set", KEYS[2], claim, "px", given.claim_ttl)
return 1

--- record
-- Record a tick. KEYS: the actor's recorded ticks, its claim, the notes. Returns whether the tick is this token's, and
-- whether a note was written.
--
-- What must reach the ledger is noted in the same script, so that it survives the process and a database outage.
--[[parts]]
-- how: see `Settling`. last_missed: the last tick that is missed if there is a gap before this one. most, ttl: as for claim.
-- actor: its name; nil: write no notes. row: the row for the ledger; nil: none. most_notes: their maximum number.
local at, token, how = given.tick, given.token, given.how
local tick = tonumber(at)

local there = redis.call("zrangebyscore", KEYS[1], tick, tick)[1]
if there then
    local _, whose = parts(there)
    return {(whose == token or whose == "*") and 1 or 0, 0}
end
local known = redis.call("zcard", KEYS[1])
if known == 0 and how == "retried" then return {1, 0} end
local before = redis.call("zrevrangebyscore", KEYS[1], "(" .. at, "-inf", "limit", 0, 1)[1]
if not before and known >= given.most then
    return {(how == "begun" or how == "retried") and 1 or 0, 0}
end
-- Passed: a later tick was recorded and counted this one as missed.
local later, passed = redis.call("zrangebyscore", KEYS[1], "(" .. at, "+inf", "limit", 0, 1)[1], false
if later then
    local _, _, since = parts(later)
    passed = since ~= nil and since < tick
end
local claimed = redis.call("get", KEYS[2]) == at .. ":" .. token
if passed and how ~= "missed" and not claimed then return {0, 0} end
before = before and parts(before)
redis.call("zadd", KEYS[1], tick, at .. ":" .. token .. ":" .. (before and string.format("%d", before) or ""))
redis.call("zremrangebyrank", KEYS[1], 0, -given.most - 1)
redis.call("pexpire", KEYS[1], given.ttl)
if claimed then redis.call("del", KEYS[2]) end
if not given.actor or redis.call("hlen", KEYS[3]) >= given.most_notes then return {1, 0} end
local noted = 0
local function note(kind, about, value)
    redis.call("hset", KEYS[3], kind .. ":" .. about .. ":" .. given.actor, value)
    noted = 1
end
if passed and how ~= "missed" then
    note("fired", at, "1")
elseif before and before < tonumber(given.last_missed) and not passed then
    local unsent_since = string.match(token, "%-(%d+)$")
    note("gap", given.last_missed, string.format("%d", before) .. (unsent_since and ":" .. unsent_since or ""))
end
if given.row then note("row." .. token, at, given.row) end
if noted == 1 then redis.call("pexpire", KEYS[3], given.ttl) end
return {1, noted}
