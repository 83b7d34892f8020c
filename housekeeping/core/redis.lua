--- allow
-- KEYS[1]: a sorted set with the time of each call that was allowed. ARGV: a unique name for this call, the maximum
-- number of calls, the period in ms. The time is Redis's, so that all callers share one clock.
local time = redis.call("time")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call("zremrangebyscore", KEYS[1], "-inf", now - ARGV[3])
if redis.call("zcard", KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call("zadd", KEYS[1], now, ARGV[1])
redis.call("pexpire", KEYS[1], ARGV[3])
return 1
