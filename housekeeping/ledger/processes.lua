--- write
-- KEYS: the sorted set of the times of the last heartbeats; the hash of the heartbeats. ARGV: the process's id, its
-- heartbeat, the seconds for which entries are kept. The times are the server's.
local time = redis.call("time")
local now = time[1] + time[2] / 1000000
redis.call("zadd", KEYS[1], string.format("%.3f", now), ARGV[1])
redis.call("hset", KEYS[2], ARGV[1], ARGV[2])
for _, id in ipairs(redis.call("zrangebyscore", KEYS[1], "-inf", now - ARGV[3], "limit", 0, 1000)) do
    redis.call("zrem", KEYS[1], id)
    redis.call("hdel", KEYS[2], id)
end
redis.call("expire", KEYS[1], ARGV[3])
redis.call("expire", KEYS[2], ARGV[3])
