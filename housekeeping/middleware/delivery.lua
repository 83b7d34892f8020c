-- A delivery begins with `admit` and ends with `dismiss`. Each runs up to three parts: that of the running mark, of the
-- deduplication key and of the lease. `given` has the arguments of each part under its name, nil if it is not needed. The
-- KEYS of the parts follow each other.

--- begin
-- Begin a delivery. KEYS: the completion, the running mark, the number of the last enqueued retry. token: this delivery's
-- token. ttl: the mark's ttl in ms. retry: the number of this retry. Returns "completed:" and the id of the message that
-- was, "retried", or the token of the running delivery, which may be this one. Repeated by the running delivery, it
-- renews the mark.
local completed, running, retried = unpack(redis.call("mget", unpack(KEYS)))
if completed then return "completed:" .. completed end
if tonumber(retried or "0") > given.retry then return "retried" end
if running and running ~= given.token then return running end
redis.call("set", KEYS[2], given.token, "px", given.ttl)
return given.token

--- finish
-- End a delivery. KEYS and token as in begin. ttl: that of the completion in ms. completed_by: the id of the completed
-- message; nil: the delivery did not complete. retry: the number of its retry; 0: none.
local over = redis.call("get", KEYS[2]) == given.token and {KEYS[2]} or {}
if given.completed_by then
    redis.call("set", KEYS[1], given.completed_by, "px", given.ttl)
    over[#over + 1] = KEYS[3]
elseif given.retry ~= 0 then
    redis.call("set", KEYS[3], given.retry, "px", given.ttl)
end
if #over > 0 then redis.call("del", unpack(over)) end

--- parts
local used = 0
local function part(name, script, keys)
    if not given[name] then return nil end
    used = used + keys
    return script({unpack(KEYS, used - keys + 1, used)}, given[name])
end

--- admit
-- Begin a run. shares_key: whether the message runs even if another one has its key. Returns 1 if no part refuses. Else
-- the answers of the parts, up to the first that refuses, and the time in ms until the lease expires.
--[[parts]]
local function begin(KEYS, given) --[[begin]] end
local function start(KEYS, given) --[[start]] end
local function obtain(KEYS, given) --[[obtain]] end
local mark = part("mark", begin, 3)
if mark and mark ~= given.mark.token then return {mark, "", "", 0} end
local key = part("key", start, 1)
if key and key ~= "ours" and not given.shares_key then return {mark or "", key, "", 0} end
local holder = part("lease", obtain, 1)
if (not key or key == "ours") and (not holder or holder == given.lease.token) then return 1 end
return {mark or "", key or "", holder or "", holder and redis.call("pttl", KEYS[used]) or 0}

--- dismiss
-- End a run. owes_rerun: whether a run that lost its key is followed by another one. ack: the arguments of Dramatiq's
-- script that acknowledges the message, whose KEYS are the broker's namespace. Returns 1 if the lease was held, the key was
-- released, the completion recorded and the message acknowledged. Else whether the lease was held, the answer of the key's
-- release, and whether the rest was done. A wanted rerun is enqueued before that.
--[[parts]]
local function give_back(KEYS, given) --[[give_back]] end
local function release(KEYS, given) --[[release]] end
local function finish(KEYS, given) --[[finish]] end
local function acknowledge(KEYS, ARGV) --[[dispatch]] end
local held = part("lease", give_back, 1) or 1
local left = part("key", release, 1) or 0
if left == 1 or (left == 2 and given.owes_rerun) then return {held, left, 0} end
part("mark", finish, 3)
part("ack", acknowledge, 1)
return held == 1 and left == 0 and 1 or {held, left, 1}
