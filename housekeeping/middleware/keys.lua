-- The deduplication key, a hash in Redis with a ttl. Each script changes one key, KEYS[1], in one step.
--
-- state      the message that holds the key ...       next states
-- (no key)   there is none                            claim -> reserved, or waiting with its copy in the queue
-- reserved   is not in the queue yet                  confirm -> waiting; start -> running; release, ttl -> (no key)
-- waiting    waits to start, is delayed, or waits     claim by the same message -> waiting; start -> running, or
--            for a retry                              (no key) with ttl 0; release, ttl -> (no key)
-- running    has a delivery that runs                 renew; retain -> waiting; release -> (no key), or kept for a rerun
--                                                     that claims or confirms it -> waiting; ttl -> (no key)
--
-- id      the message that holds the key
-- run     the token of the delivery that runs, or has ended and owes a rerun
-- again   set if a rerun after this run is wanted
-- queued  the id in Redis of the message's copy, where the queue is on the same Redis
-- bodies  the Redis key of the hash with that copy. The copy is there until the message is acknowledged, after its key
--         was freed, or is due, when the key gets its next copy. A key whose copy is gone has outlived its message, for
--         example in a failover of Redis or an emptied queue, and the next message takes it.
-- mark    the Redis key of the mark that a running message renews. A second delivery runs without a copy.
-- tick    the token of the waiting copy's claim, for a message of a tick. Such a message may be in the queue twice.
--
-- `given` has the arguments by name; one that is nil was not given. All have `message_id`, and `ttl` in ms. When claim or
-- retain returns the id of a holder, the message must not be enqueued.

--- claim
-- Take the key unless another message holds it. Returns the holder's id, or "" when the message may be enqueued.
-- state: "reserved" or "waiting".
-- ask_for_rerun: whether a running holder is to be followed by a rerun.
-- never_drop: whether the message is enqueued even if another one holds the key.
-- ended_run: the token of the ended run whose key this message takes over as its rerun.
-- tick: the claim of the message's tick.
-- position, position_ttl: the message's database position, and for how long to remember it in ms.
local message_id, state = given.message_id, given.state

local holder, its_state, run, queued, bodies, mark =
    unpack(redis.call("hmget", KEYS[1], "id", "state", "run", "queued", "bodies", "mark"))
local function free()
    redis.call("del", KEYS[1])
    holder, its_state, run = false, false, false
end
local function holder_has_ended()
    if not queued or redis.call("hexists", bodies, queued) == 1 then return false end
    return not mark or redis.call("exists", mark) == 0
end
if holder and holder ~= message_id and holder_has_ended() then free() end
if given.ended_run and run == given.ended_run then
    -- A reservation takes over nothing yet: the ended run owes the rerun until its message is in the queue.
    if state == "reserved" then return "" end
    free()
end
local running = its_state == "running"
if holder and holder ~= message_id then
    if given.never_drop then return "" end
    if given.ask_for_rerun and running then redis.call("hset", KEYS[1], "again", "1") end
    if given.position then
        -- The holder must read data as fresh as this duplicate's sender saw.
        local newest = string.gsub(KEYS[1], ":dedup:", ":position:", 1)
        if given.position >= (redis.call("get", newest) or "") then
            redis.call("set", newest, given.position, "px", given.position_ttl)
        end
    end
    return holder
end
if not running then
    redis.call("hset", KEYS[1], "id", message_id, "state", state)
    if given.tick then redis.call("hset", KEYS[1], "tick", given.tick) end
    redis.call("pexpire", KEYS[1], given.ttl)
end
return ""

--- retain
-- Keep the key for a message that is due, or goes back to the queue. Returns "", or the message's own id if another
-- delivery has completed it and the retry has nothing to do.
-- run: the token of the run; nil: it did not run.
-- rerun_still_wanted: whether a requested rerun is kept until after the next run. A failed run starts over, so it needs
-- no rerun. A requeued run resumes where it stopped and still needs it.
-- tick: the claim of the message's tick.
-- completion: the Redis key of the message's completion, for a retry.
local message_id, run = given.message_id, given.run

local holder = redis.call("hget", KEYS[1], "id")
if holder and (holder ~= message_id or (redis.call("hget", KEYS[1], "run") or run) ~= run) then return "" end
if not holder and not run then return "" end
if not holder and given.completion and redis.call("exists", given.completion) == 1 then return message_id end
local again = given.rerun_still_wanted and redis.call("hget", KEYS[1], "again")
redis.call("del", KEYS[1])
redis.call("hset", KEYS[1], "id", message_id, "state", "waiting")
if again then redis.call("hset", KEYS[1], "again", "1") end
if given.tick then redis.call("hset", KEYS[1], "tick", given.tick) end
redis.call("pexpire", KEYS[1], given.ttl)
return ""

--- release
-- Free the key. Returns 0: done; 1: a rerun is wanted, so the key stays held until the rerun's message takes it over;
-- 2: the delivery does not hold the key, so whether a rerun is wanted is unknown. Repeated after a lost answer it
-- returns the same, or 2.
-- run: the token of the delivery, with which the rerun's message takes over the key; nil: there is none.
-- started: whether Redis answered its start. Else the key may still be that of a waiting message.
-- even_if_rerun: whether to free the key even if a rerun is wanted.
-- tick: the claim of its tick: a copy that did not start must not free the key of another, waiting copy.
local run, tick = given.run, given.tick

local holder, held_by, its_tick, again = unpack(redis.call("hmget", KEYS[1], "id", "run", "tick", "again"))
if holder ~= given.message_id then return run and 2 or 0 end
held_by = held_by or nil
if held_by ~= run and (given.started or held_by) then return 0 end
if tick and (its_tick or tick) ~= tick then return 0 end
if not given.even_if_rerun and again then
    if run then redis.call("hset", KEYS[1], "run", run) end
    redis.call("pexpire", KEYS[1], given.ttl)
    return 1
end
redis.call("del", KEYS[1])
return 0

--- confirm
-- Turn a reservation into a waiting message, now that the message is in the queue. A worker may have started it
-- already; then there is nothing to confirm.
-- ended_run: as for claim.
local message_id = given.message_id
local function take_over()
    redis.call("del", KEYS[1])
    redis.call("hset", KEYS[1], "id", message_id, "state", "waiting")
    redis.call("pexpire", KEYS[1], given.ttl)
end
local holder = redis.call("hget", KEYS[1], "id")
local run = redis.call("hget", KEYS[1], "run")
if run and run == given.ended_run then return take_over() end
if holder ~= message_id then return end
if redis.call("hget", KEYS[1], "state") ~= "reserved" then return end
redis.call("hset", KEYS[1], "state", "waiting")
redis.call("pexpire", KEYS[1], given.ttl)

--- start
-- Begin a run. Returns "ours", or the state of the other message that holds the key, ":" and its id.
-- ttl: 0 frees the key at the start.
-- run: the token of the delivery.
-- copy, bodies, mark: the id in Redis of the delivered copy, the Redis key of its queue's bodies, and that of the running
-- mark; nil if the queue is not on the same Redis.
local message_id = given.message_id
local copy = given.copy and {"queued", given.copy, "bodies", given.bodies, "mark", given.mark} or {}

local holder, state, again = unpack(redis.call("hmget", KEYS[1], "id", "state", "again"))
if holder and holder ~= message_id then return state .. ":" .. holder end
redis.call("del", KEYS[1])
if given.ttl == 0 then return "ours" end
redis.call("hset", KEYS[1], "id", message_id, "state", "running", "run", given.run, unpack(copy))
if again then redis.call("hset", KEYS[1], "again", "1") end
redis.call("pexpire", KEYS[1], given.ttl)
return "ours"

--- renew
-- Reset the key's ttl. run: the token of the run. Returns 0 when the run no longer holds the key.
if redis.call("hget", KEYS[1], "run") ~= given.run then return 0 end
return redis.call("pexpire", KEYS[1], given.ttl)

--- free
-- Free the key. Return what it contained; an empty table if it was free.
local held = redis.call("hmget", KEYS[1], "id", "state", "again")
local left = redis.call("pttl", KEYS[1])
if redis.call("del", KEYS[1]) == 0 then return {} end
return {held[1], held[2], held[3], left}
