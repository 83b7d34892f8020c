-- A lease in Redis is a key that contains its holder's token. KEYS[1] is the lease, `given` has the token and the ttl in
-- ms by name.

--- obtain
-- Returns the token that holds the lease now. It can be repeated with the same token, so it is retried after a lost
-- answer.
local holder = redis.call("get", KEYS[1])
if holder and holder ~= given.token then return holder end
if holder then redis.call("pexpire", KEYS[1], given.ttl) -- which a full Redis accepts
else redis.call("set", KEYS[1], given.token, "px", given.ttl) end
return given.token

--- renew
if redis.call("get", KEYS[1]) ~= given.token then return 0 end
return redis.call("pexpire", KEYS[1], given.ttl)

--- release
if redis.call("get", KEYS[1]) ~= given.token then return 0 end
return redis.call("del", KEYS[1])
