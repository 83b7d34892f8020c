--- clock
-- Part of Dramatiq's script: take the time of a heartbeat from Redis. With the time of each process, one whose clock is
-- ahead would take the others for dead, and requeue their running messages.
local time = redis.call("time")
ARGV[2] = string.format("%.0f", time[1] * 1000 + math.floor(time[2] / 1000))

--- nack
-- Dramatiq's script for ``nack``, whose further argument is the new body of the message.
local function dispatch(KEYS, ARGV) --[[dispatch]] end
local messages = KEYS[1] .. ":" .. ARGV[3] .. ".msgs"
if redis.call("hexists", messages, ARGV[9]) == 1 then redis.call("hset", messages, ARGV[9], ARGV[10]) end
return dispatch(KEYS, ARGV)

--- move
-- KEYS: the queue's dead letters by time, their bodies; the queue, its bodies. ARGV: the dead letter's id in Redis, the
-- message's new id, its body. Returns whether it was moved. Repeated after a lost answer it returns the same, unless a
-- worker has acknowledged the message by then.
if redis.call("zrem", KEYS[1], ARGV[1]) == 0 then return redis.call("hexists", KEYS[4], ARGV[2]) end
redis.call("hdel", KEYS[2], ARGV[1])
redis.call("hset", KEYS[4], ARGV[2], ARGV[3])
redis.call("rpush", KEYS[3], ARGV[2])
return 1
