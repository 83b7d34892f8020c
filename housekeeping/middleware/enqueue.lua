-- Enqueueing in one script with the change of a key. Dramatiq's own script enqueues; `given.dispatch` has its arguments up
-- to the message's copy, as texts. What differs between the messages of an actor follows `given`, whose JSON is kept.

--- take
-- Take a free key for a message and its copy in the queue, as `claim` does, in fewer commands.
local function take(key, message_id, copy, bodies, step)
    redis.call("hset", key, "id", message_id, "state", step.state, "queued", copy, "bodies", bodies)
    if step.tick then redis.call("hset", key, "tick", step.tick) end
    redis.call("pexpire", key, step.ttl)
end

--- one
-- Change a key and enqueue a message. KEYS: the key, the broker's namespace. once: whether one waiting copy of the message
-- is enough. step: the arguments of the key's script. ARGV: given, the body, the ids of the copy and of the message. Returns
-- the holder's id, or "" when the message is in the queue. Repeating the script changes nothing.
local function step(KEYS, given) --[[step]] end
local body, copy, message_id = unpack(ARGV, 2)
local messages = KEYS[2] .. ":" .. given.dispatch[3] .. ".msgs"
given.step.message_id = message_id
-- The sender got no answer to its first attempt.
if redis.call("hexists", messages, copy) == 1 then return "" end
local function waits()
    local holder, state, queued = unpack(redis.call("hmget", KEYS[1], "id", "state", "queued"))
    return holder == message_id and state == "waiting", queued, holder
end
local waiting, queued, holder = waits()
if not holder and given.step.state then
    take(KEYS[1], message_id, copy, messages, given.step)
    enqueue(copy, body)
    return ""
end
if given.once and waiting and queued and redis.call("hexists", messages, queued) == 1 then return message_id end
local prevented_by = step({KEYS[1]}, given.step)
if type(prevented_by) == "string" and prevented_by ~= "" then return prevented_by end
enqueue(copy, body)
if waits() then redis.call("hset", KEYS[1], "queued", copy, "bodies", messages) end
return ""

--- enqueue
-- What `one` does with a single message.
--[[take]]
local function dispatch(KEYS, ARGV) --[[dispatch]] end
local function enqueue(copy, body)
    given.dispatch[9], given.dispatch[10] = copy, body
    dispatch({KEYS[2]}, given.dispatch)
end

--- many
-- The same for many messages of one queue, without keys or with claims that differ only in key and message id. KEYS: the
-- broker's namespace, the key of each message. once: as in `one`. step: the shared arguments of the claims; nil without
-- keys. ARGV: given, the bodies, and by the name ids the id of each message, which is also that of its copy.
-- Returns the number of each message that was not enqueued, followed by the id of the holder of its key.
--[[take]]
local copies, entries, written = {}, {}, 0
local function enqueue(copy, body)
    copies[#copies + 1] = copy
    entries[#entries + 1] = copy
    entries[#entries + 1] = body
end
local function write_bodies(messages)
    if #entries > written then redis.call("hset", messages, unpack(entries, written + 1)) end
    written = #entries
end
local function one(KEYS, ARGV, given) --[[one]] end
local function dispatch(KEYS, ARGV) --[[dispatch]] end
local shared, ids, dispatched = given.step, cjson.decode(ARGV[#ARGV]).ids, given.dispatch
local queue = KEYS[1] .. ":" .. dispatched[3]
local prevented = {}
local queued = shared and redis.call("hmget", queue .. ".msgs", unpack(ids)) or {}
for n, message_id in ipairs(ids) do
    local key, body = KEYS[n + 1], ARGV[n + 1]
    if key and redis.call("exists", key) == 1 then
        write_bodies(queue .. ".msgs") -- the holder may be an equal call of this bulk
        local holder = one({key, KEYS[1]}, {"", body, message_id, message_id}, given)
        if holder ~= "" then
            prevented[#prevented + 1] = n
            prevented[#prevented + 1] = holder
        end
    elseif not queued[n] then
        if key then take(key, message_id, message_id, queue .. ".msgs", shared) end
        enqueue(message_id, body)
    end
end
-- Dramatiq's script enqueues the first copy and does its maintenance. The others follow as it would add them.
if #copies > 0 then
    dispatched[9], dispatched[10] = entries[1], entries[2]
    dispatch({KEYS[1]}, dispatched)
    write_bodies(queue .. ".msgs")
    if #copies > 1 then redis.call("rpush", queue, unpack(copies, 2)) end
end
return prevented
