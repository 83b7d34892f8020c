"""Lua scripts that enqueue messages and change their deduplication keys, with Dramatiq's own script within them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from housekeeping.middleware.deduplication import scripts

#: A change of a key (CLAIM, RETAIN or RELEASE) and Dramatiq's enqueueing in one script. KEYS: the key, the broker's
#: namespace. ARGV: whether one waiting copy of the message is enough, the number of the change's arguments, these
#: arguments, Dramatiq's arguments. Returns the holder's id, or "" when the message is in the queue. Repeating the
#: script changes nothing.
WITH_ENQUEUEING: Final = """
local function step(KEYS, ARGV) %(step)s end
local function dispatch(KEYS, ARGV) %(dispatch)s end
local last = 2 + tonumber(ARGV[2])
local dispatched = {unpack(ARGV, last + 1)}
local messages, copy, message_id = KEYS[2] .. ":" .. dispatched[3] .. ".msgs", dispatched[9], ARGV[3]
-- The sender got no answer to its first attempt.
if redis.call("hexists", messages, copy) == 1 then return "" end
local function waits()
    return redis.call("hget", KEYS[1], "id") == message_id and redis.call("hget", KEYS[1], "state") == "waiting"
end
if ARGV[1] == "1" and waits() then
    local queued = redis.call("hget", KEYS[1], "queued")
    if queued and redis.call("hexists", messages, queued) == 1 then return message_id end
end
local holder = step({KEYS[1]}, {unpack(ARGV, 3, last)})
if type(holder) == "string" and holder ~= "" then return holder end
dispatch({KEYS[2]}, dispatched)
-- A delayed copy is replaced by another one when it is due, and the key is not told.
local bodies = string.sub(messages, -8) == ".DQ.msgs" and "" or messages
if waits() then redis.call("hset", KEYS[1], "queued", copy, "bodies", bodies) end
return ""
"""

#: The same for many messages of one queue whose claims differ only in key and message id. KEYS: the broker's namespace,
#: the key of each message. ARGV: whether one waiting copy is enough, the number of shared claim arguments, these
#: arguments, Dramatiq's arguments before the copy, then id and body of each message. A copy has its message's id.
#: Returns for each message what WITH_ENQUEUEING returns. A free key is written directly, which is several times faster.
WITH_ENQUEUEING_MANY: Final = """
local copies, entries, written = {}, {}, 0
local function collect(copy, body)
    copies[#copies + 1] = copy
    entries[#entries + 1] = copy
    entries[#entries + 1] = body
end
local function write_bodies(messages)
    if #entries > written then redis.call("hset", messages, unpack(entries, written + 1)) end
    written = #entries
end
local function one(KEYS, ARGV) %(one)s end
local function dispatch(KEYS, ARGV) %(dispatch)s end
local last = 2 + tonumber(ARGV[2])
local shared, dispatched = {unpack(ARGV, 3, last)}, {unpack(ARGV, last + 1, last + 8)}
local ttl, state, tick = shared[1], shared[2], shared[7]
local queue = KEYS[1] .. ":" .. dispatched[3]
local ids, holders = {}, {}
for n = 2, #KEYS do ids[n - 1] = ARGV[last + 2 * n + 5] end
local queued = redis.call("hmget", queue .. ".msgs", unpack(ids))
for n = 2, #KEYS do
    local key, message_id, body = KEYS[n], ids[n - 1], ARGV[last + 2 * n + 6]
    local holder = ""
    if redis.call("exists", key) == 1 then
        local alone = {ARGV[1], ARGV[2] + 1, message_id, unpack(shared)}
        for i = 1, #dispatched do alone[#alone + 1] = dispatched[i] end
        alone[#alone + 1] = message_id
        alone[#alone + 1] = body
        write_bodies(queue .. ".msgs") -- the holder may be an equal call of this bulk
        holder = one({key, KEYS[1]}, alone)
    elseif not queued[n - 1] then
        redis.call("hset", key, "id", message_id, "state", state, "queued", message_id, "bodies", queue .. ".msgs")
        if tick ~= "" then redis.call("hset", key, "tick", tick) end
        redis.call("pexpire", key, ttl)
        collect(message_id, body)
    end
    holders[n - 1] = holder
end
-- Dramatiq's script enqueues the first copy and does its maintenance. The others follow as it would add them.
if #copies > 0 then
    dispatched[9], dispatched[10] = entries[1], entries[2]
    dispatch({KEYS[1]}, dispatched)
    write_bodies(queue .. ".msgs")
    if #copies > 1 then redis.call("rpush", queue, unpack(copies, 2)) end
end
return holders
"""

#: Enqueue many messages of one queue that have no key. KEYS: the broker's namespace. ARGV: Dramatiq's arguments before
#: the copy, then id and body of each message. Returns "" for each message.
MANY_WITHOUT_KEYS: Final = """
local function dispatch(KEYS, ARGV) %(dispatch)s end
dispatch(KEYS, {unpack(ARGV, 1, 10)})
local queue, copies, holders = KEYS[1] .. ":" .. ARGV[3], {}, {""}
for n = 11, #ARGV, 2 do
    copies[#copies + 1] = ARGV[n]
    holders[#holders + 1] = ""
end
if #copies > 0 then
    redis.call("hset", queue .. ".msgs", unpack(ARGV, 11))
    redis.call("rpush", queue, unpack(copies))
end
return holders
"""

#: Prefix of a script whose arguments arrive as two: all but the last, each followed by a NUL character, and the last.
#: For two dozen separate arguments, redis-py would take as long as Redis takes for the script.
PACKED: Final = """
local last_argument, packed = ARGV[2], ARGV[1]
local ARGV = {}
for argument in string.gmatch(packed, "([^%z]*)%z") do ARGV[#ARGV + 1] = argument end
ARGV[#ARGV + 1] = last_argument
"""


def packed(args: Sequence[object]) -> tuple[str, Any]:
    """Return the arguments of a script that begins with `PACKED`.

    Raises:
      ValueError: An argument contains a NUL character, such as a queue's name.
    """
    text = "".join(f"{each}\0" for each in args[:-1])
    if text.count("\0") != len(args) - 1:
        raise ValueError("names of actors and queues, and ids of messages, cannot contain a NUL character")
    return text, args[-1]


def with_enqueueing(step: str, dispatch: str) -> str:
    """Return one script that changes a key and enqueues a message by the broker's own script."""
    return WITH_ENQUEUEING % {"step": step, "dispatch": dispatch}


def with_enqueueing_many(dispatch: str) -> str:
    """Return the script that claims keys for many messages; it runs the script for one message for held keys."""
    one = with_enqueueing(scripts.CLAIM, "collect(ARGV[9], ARGV[10])")
    return WITH_ENQUEUEING_MANY % {"one": one, "dispatch": dispatch}
