--- nack
-- Dramatiq's script for ``nack``, whose further argument is the new body of the message.
local function dispatch(KEYS, ARGV) --[[dispatch]] end
local messages = KEYS[1] .. ":" .. ARGV[3] .. ".msgs"
if redis.call("hexists", messages, ARGV[9]) == 1 then redis.call("hset", messages, ARGV[9], ARGV[10]) end
return dispatch(KEYS, ARGV)
