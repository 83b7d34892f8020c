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
