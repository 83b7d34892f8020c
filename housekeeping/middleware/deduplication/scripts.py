"""What becomes of a deduplication key at each step of its message: one Lua script a step, atomic, one round trip."""

from __future__ import annotations

from typing import Final

# A key is a hash. `id`: the message that holds it; `state`: reserved (its sender has not enqueued it yet), waiting or
# running; `run`: a token of the one delivery that runs; `again`: one more run is wanted after it; `queued`: the id in
# Redis of the copy that waits, where the broker's queue is on the same Redis; `tick`: of a tick's message, which may
# come into the queue twice under one id, the claim of the copy that waits; `retry`: the message waits for a retry that
# a new message may supersede, and this is the ttl in ms that the key keeps after the retry's due time; `next`: the new
# message that does so, while its sender enqueues it on another server; `next_left`: down to which ttl of the key.

# The first arguments of all that may go with an enqueueing: message id, ttl in ms, state. Where such a script returns
# the id of a holder, the message is not to be enqueued.

#: A superseded message is remembered beside the key, because the key may be free by the time its retry comes due.
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
#: Further ARGV: whether to ask for one more run of a running holder, whether the message is enqueued in any case;
#: whose key it takes over, message id and run: of the run that is over and that it is to come after ("": nobody's);
#: the claim of its tick ("": none). What is only reserved takes over nothing: the run owes it until it is in the queue.
#: ARGV[9]: supersede a holder whose retry is due later than in so many ms ("": never). What is only reserved supersedes
#: nothing either, so that the retry is not lost with its sender.
#: Of a message that carries one, its position and for how long that is remembered in ms: where it is dropped, the
#: message that stands for it finds the newest one beside the key.
CLAIM: Final = (
    _SUPERSEDED
    + """
local holder = redis.call("hget", KEYS[1], "id")
if holder and holder == ARGV[6] and redis.call("hget", KEYS[1], "run") == ARGV[7] then
    if ARGV[3] == "reserved" then return "" end
    redis.call("del", KEYS[1])
    holder = false
end
local running = redis.call("hget", KEYS[1], "state") == "running"
if holder and holder ~= ARGV[1] and ARGV[9] ~= "" and retry_due_in() > tonumber(ARGV[9]) then
    if ARGV[3] == "reserved" then
        local left, next = redis.call("pttl", KEYS[1]), redis.call("hmget", KEYS[1], "next", "next_left")
        if not next[1] or next[1] == ARGV[1] or left <= tonumber(next[2]) then
            redis.call("hset", KEYS[1], "next", ARGV[1], "next_left", left - ARGV[2])
            return ""
        end
        holder = next[1]
    else
        mark_superseded(holder, ARGV[1])
        redis.call("del", KEYS[1])
        holder = false
    end
end
if holder and holder ~= ARGV[1] then
    if ARGV[5] == "1" then return "" end
    if ARGV[4] == "1" and running then redis.call("hset", KEYS[1], "again", "1") end
    if ARGV[10] then
        local newest = string.gsub(KEYS[1], ":dedup:", ":position:", 1)
        if ARGV[10] >= (redis.call("get", newest) or "") then redis.call("set", newest, ARGV[10], "px", ARGV[11]) end
    end
    return holder
end
if not running then
    redis.call("hset", KEYS[1], "id", ARGV[1], "state", ARGV[3])
    if ARGV[8] ~= "" then redis.call("hset", KEYS[1], "tick", ARGV[8]) end
    redis.call("pexpire", KEYS[1], ARGV[2])
end
return ""
"""
)
#: Further ARGV: the run's token ("": it did not run), whether who asked for one more run still waits for it (a run that
#: failed is repeated from its beginning and serves them, one that was put back goes on where it stopped), and the claim
#: of its tick ("": none); the ttl in ms after its due time, if a new message may supersede it until then ("": never);
#: for a retry, the key of its message's completion ("": none). A retry whose message another delivery has completed
#: meanwhile has nothing to do: it returns its own id, as for a message that is in the queue already, and takes no key.
RETAIN: Final = """
local holder = redis.call("hget", KEYS[1], "id")
if holder and (holder ~= ARGV[1] or (redis.call("hget", KEYS[1], "run") or ARGV[4]) ~= ARGV[4]) then return "" end
if not holder and ARGV[4] == "" then return "" end
if not holder and ARGV[8] ~= "" and redis.call("exists", ARGV[8]) == 1 then return ARGV[1] end
local again = ARGV[5] == "1" and redis.call("hget", KEYS[1], "again")
redis.call("del", KEYS[1])
redis.call("hset", KEYS[1], "id", ARGV[1], "state", ARGV[3])
if again then redis.call("hset", KEYS[1], "again", "1") end
if ARGV[6] ~= "" then redis.call("hset", KEYS[1], "tick", ARGV[6]) end
if ARGV[7] ~= "" then redis.call("hset", KEYS[1], "retry", ARGV[7]) end
redis.call("pexpire", KEYS[1], ARGV[2])
return ""
"""
#: Further ARGV: the run's token ("": it did not run), whether to free it even if one more run is wanted, and of a copy
#: that did not run the claim of its tick ("": none): it frees nothing of another copy that waits.
#: Returns 1 when one is: the key is then held on, until that run's message takes it over in the step that enqueues
#: it. 2: the run had lost the key, so nobody can tell. Asked again after a lost answer it says the same, or 2.
RELEASE: Final = """
if redis.call("hget", KEYS[1], "id") ~= ARGV[1] then return ARGV[4] ~= "" and 2 or 0 end
if (redis.call("hget", KEYS[1], "run") or "") ~= ARGV[4] then return 0 end
if ARGV[6] ~= "" and (redis.call("hget", KEYS[1], "tick") or ARGV[6]) ~= ARGV[6] then return 0 end
if ARGV[5] ~= "1" and redis.call("hget", KEYS[1], "again") then
    redis.call("pexpire", KEYS[1], ARGV[2])
    return 1
end
redis.call("del", KEYS[1])
return 0
"""
#: ARGV: message id, ttl in ms; whose key it takes over, message id and run ("": nobody's). A worker may have been
#: quicker than the sender: then there is nothing to confirm.
CONFIRM: Final = (
    _SUPERSEDED
    + """
local holder = redis.call("hget", KEYS[1], "id")
if redis.call("hget", KEYS[1], "next") == ARGV[1] then
    mark_superseded(holder, ARGV[1])
    redis.call("del", KEYS[1])
    redis.call("hset", KEYS[1], "id", ARGV[1], "state", "waiting")
    redis.call("pexpire", KEYS[1], ARGV[2])
    return
end
local run = redis.call("hget", KEYS[1], "run")
if run and run == ARGV[4] and holder == ARGV[3] then
    redis.call("del", KEYS[1])
    redis.call("hset", KEYS[1], "id", ARGV[1], "state", "waiting")
    redis.call("pexpire", KEYS[1], ARGV[2])
    return
end
if holder ~= ARGV[1] then return end
if redis.call("hget", KEYS[1], "state") ~= "reserved" then return end
redis.call("hset", KEYS[1], "state", "waiting")
redis.call("pexpire", KEYS[1], ARGV[2])
"""
)
#: ARGV: message id, ttl in ms (0: the start frees the key), the run's token, what the mark of the delivery at work
#: with the message, KEYS[2] if given, says of this one, and for how long in ms a superseded message that was dropped is
#: remembered, should it be delivered again. Returns "ours", the other's state, "superseded:" and the id of the message
#: that did it, or "elsewhere": the process was stopped on its way here, and the message went to another one that has
#: its key by now. A superseding message may start before its sender has confirmed it.
START: Final = (
    _SUPERSEDED
    + """
local at_work = KEYS[2] and redis.call("get", KEYS[2])
if at_work and at_work ~= ARGV[4] then return "elsewhere" end
local holder = redis.call("hget", KEYS[1], "id")
if holder ~= ARGV[1] and ARGV[2] ~= "0" then
    local by = redis.call("get", mark_of(ARGV[1]))
    if by then
        redis.call("pexpire", mark_of(ARGV[1]), ARGV[5])
        return "superseded:" .. by
    end
    if holder and redis.call("hget", KEYS[1], "next") == ARGV[1] then
        mark_superseded(holder, ARGV[1])
        holder = false
    end
end
if holder and holder ~= ARGV[1] then return redis.call("hget", KEYS[1], "state") end
local again = redis.call("hget", KEYS[1], "again")
redis.call("del", KEYS[1])
if ARGV[2] == "0" then return "ours" end
redis.call("hset", KEYS[1], "id", ARGV[1], "state", "running", "run", ARGV[3])
if again then redis.call("hset", KEYS[1], "again", "1") end
redis.call("pexpire", KEYS[1], ARGV[2])
return "ours"
"""
)
#: ARGV: the run's token, ttl in ms.
RENEW: Final = """
if redis.call("hget", KEYS[1], "run") ~= ARGV[1] then return 0 end
return redis.call("pexpire", KEYS[1], ARGV[2])
"""

#: A step and Dramatiq's own enqueueing as one. KEYS: the key, the broker's name space. ARGV: whether a
#: copy of the message that waits already is enough, how many arguments are the step's, those, those of `dispatch`.
#: Returns who holds the key; empty when the message is in the queue. Repeating it changes nothing: a copy that is
#: there already, though its sender got no answer, is not put there twice.
WITH_ENQUEUEING: Final = """
local function step(KEYS, ARGV) %(step)s end
local function dispatch(KEYS, ARGV) %(dispatch)s end
local last = 2 + tonumber(ARGV[2])
local given = {unpack(ARGV, last + 1)}
local messages, copy, message_id = KEYS[2] .. ":" .. given[3] .. ".msgs", given[9], ARGV[3]
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
dispatch({KEYS[2]}, given)
if waits() then redis.call("hset", KEYS[1], "queued", copy) end
return ""
"""

#: The same for many messages of one queue, whose claims differ in key and message id alone. KEYS: the broker's name
#: space, the key of each. ARGV: whether a copy that waits already is enough, how many arguments of the step they
#: share, those, what `dispatch` is given before the copy; then id and body of each, whose copy has the same id. Returns
#: for each what one would get. A key that is free needs no step; copies come into the queue together, at the end.
WITH_ENQUEUEING_MANY: Final = """
local copies, entries = {}, {}
local function collect(copy, body)
    copies[#copies + 1] = copy
    entries[#entries + 1] = copy
    entries[#entries + 1] = body
end
local function one(KEYS, ARGV) %(one)s end
local function dispatch(KEYS, ARGV) %(dispatch)s end
local last = 2 + tonumber(ARGV[2])
local shared, given = {unpack(ARGV, 3, last)}, {unpack(ARGV, last + 1, last + 8)}
local ttl, state, tick = shared[1], shared[2], shared[7]
local queue = KEYS[1] .. ":" .. given[3]
local asked, holders = {}, {}
for n = 2, #KEYS do asked[n - 1] = ARGV[last + 2 * n + 5] end
local queued = redis.call("hmget", queue .. ".msgs", unpack(asked))
for n = 2, #KEYS do
    local key, message_id, body = KEYS[n], asked[n - 1], ARGV[last + 2 * n + 6]
    local holder = ""
    if redis.call("exists", key) == 1 then
        local alone = {ARGV[1], ARGV[2] + 1, message_id, unpack(shared)}
        for i = 1, #given do alone[#alone + 1] = given[i] end
        alone[#alone + 1] = message_id
        alone[#alone + 1] = body
        holder = one({key, KEYS[1]}, alone)
    elseif not queued[n - 1] then
        redis.call("hset", key, "id", message_id, "state", state, "queued", message_id)
        if tick ~= "" then redis.call("hset", key, "tick", tick) end
        redis.call("pexpire", key, ttl)
        collect(message_id, body)
    end
    holders[n - 1] = holder
end
if #copies > 0 then
    given[9], given[10] = entries[1], entries[2]
    dispatch({KEYS[1]}, given)
    if #copies > 1 then
        redis.call("hset", queue .. ".msgs", unpack(entries, 3))
        redis.call("rpush", queue, unpack(copies, 2))
    end
end
return holders
"""


def with_enqueueing(step: str, dispatch: str) -> str:
    """The step's script and the broker's own for enqueueing, as one."""
    return WITH_ENQUEUEING % {"step": step, "dispatch": dispatch}


def with_enqueueing_many(dispatch: str) -> str:
    """The same for the claims of many messages; where a key is not free, it is the script for one that decides."""
    one = with_enqueueing(CLAIM, "collect(ARGV[9], ARGV[10])")
    return WITH_ENQUEUEING_MANY % {"one": one, "dispatch": dispatch}
