--- keep_the_last
-- KEYS: the actor's list of dead letters, newest first; Dramatiq's sorted set and hash of the queue's dead letters.
-- ARGV: the newest, the number to keep, the TTL in ms. Requeued and purged dead letters do not count.
local kept = 0
local ids = redis.call("lrange", KEYS[1], 0, -1)
table.insert(ids, 1, ARGV[1])
redis.call("del", KEYS[1])
for _, id in ipairs(ids) do
    if redis.call("zscore", KEYS[2], id) then
        if kept < tonumber(ARGV[2]) then
            redis.call("rpush", KEYS[1], id)
            kept = kept + 1
        else
            redis.call("zrem", KEYS[2], id)
            redis.call("hdel", KEYS[3], id)
        end
    end
end
redis.call("pexpire", KEYS[1], ARGV[3])

--- rewrite
-- KEYS: Dramatiq's hash of the queue's messages. ARGV: the message's id in Redis, its new body.
if redis.call("hexists", KEYS[1], ARGV[1]) == 1 then redis.call("hset", KEYS[1], ARGV[1], ARGV[2]) end

--- count
-- Count a message and return 1 if it is the last one of its group, else 0. A repeated call returns the same.
-- KEYS: the number of messages left, as Dramatiq's barrier stores it; the results of the counted messages.
-- ARGV: the message id, the TTL in ms.
local answered = redis.call("hget", KEYS[2], ARGV[1])
if answered then return tonumber(answered) end
local left = tonumber(redis.call("get", KEYS[1]) or "0") - 1
local last = left < 1 and 1 or 0
if last == 0 then redis.call("set", KEYS[1], left, "px", ARGV[2]) end
redis.call("hset", KEYS[2], ARGV[1], last)
redis.call("pexpire", KEYS[2], ARGV[2])
return last
