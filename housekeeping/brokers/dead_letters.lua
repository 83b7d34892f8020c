--- move
-- KEYS: the queue's dead letters by time, their bodies; the queue, its bodies. ARGV: the dead letter's id in Redis, the
-- message's new id, its body. Returns whether it was moved. Repeated after a lost answer it returns the same, unless a
-- worker has acknowledged the message by then.
if redis.call("zrem", KEYS[1], ARGV[1]) == 0 then return redis.call("hexists", KEYS[4], ARGV[2]) end
redis.call("hdel", KEYS[2], ARGV[1])
redis.call("hset", KEYS[4], ARGV[2], ARGV[3])
redis.call("rpush", KEYS[3], ARGV[2])
return 1
