-- A pending upload is an entry of the hash KEYS[1], from its field to the time at which it was prepared. A run claims the
-- entry before it deletes the object: the claim is a key with the run's id and a ttl, whose name ends with the field.
--
-- entry  claim  the upload ...                          next states
-- no     no     was completed, deleted or never         prepare -> pending
--               prepared
-- yes    no     is pending                              prepare -> pending; complete -> completed; take -> claimed
-- yes    yes    is claimed: its object is deleted, or   finish -> deleted; take, when the claim's run has ended ->
--               will be                                 claimed by another run; prepare, when the claim is old ->
--                                                       pending; ttl -> pending
-- no     yes    is claimed, and another program has     finish -> deleted; prepare, when the claim is old -> pending;
--               removed its entry                       ttl -> deleted
--
-- `prepare` and `complete` refuse a claimed entry, except as above. Other programs may write the entry at any time.

--- read
-- Beginning of `take` and `finish`. KEYS: the hash; the claim of each entry. ARGV: `given`; the value of each entry.
-- Lua's stack has room for 8000 values; a group has at most 256.
-- given.run: the run's id, as text.
-- given.ttl: that of a claim in ms.
-- given.begin: where in a claim's key its field begins.
local given, fields = cjson.decode(ARGV[1]), {}
for n = 2, #KEYS do fields[n - 1] = string.sub(KEYS[n], given.begin) end
local holders, values = redis.call("mget", unpack(KEYS, 2)), redis.call("hmget", KEYS[1], unpack(fields))

--- take
-- Claims the entries that still have the same value. Returns their indexes, and the ids of the runs whose claims are
-- left alone.
-- given.ended: the ids of ended runs.
local ended, claimed, others = {}, {}, {}
for _, id in ipairs(given.ended) do ended[id] = true end
for n = 1, #fields do
    local holder = holders[n] or given.run
    if holder ~= given.run and not ended[holder] then
        others[#others + 1] = holder
    elseif values[n] == ARGV[n + 1] then
        redis.call("set", KEYS[n + 1], given.run, "px", given.ttl)
        claimed[#claimed + 1] = n - 1
    end
end
return {claimed, others}

--- finish
-- Removes the entries of deleted objects with their claims. A claim that Redis has lost is written again, if an entry
-- is there. Returns for each entry: 1 removed, 2 already gone, 3 changed, 4 claimed by another run, 5 the claim was lost.
-- given.again: whether this repeats a call whose answer was lost.
local ends, claims, entries = {}, {}, {}
for n = 1, #fields do
    local holder, value = holders[n], values[n]
    local unchanged = value == ARGV[n + 1]
    if holder == given.run then
        claims[#claims + 1] = KEYS[n + 1]
        if unchanged then entries[#entries + 1] = fields[n] end
        ends[n] = unchanged and 1 or value and 3 or 2
    elseif holder then
        ends[n] = 4
    elseif given.again and not unchanged then
        ends[n] = value and 4 or 1 -- the first attempt has removed it
    else
        if value then redis.call("set", KEYS[n + 1], given.run, "px", given.ttl) end
        ends[n] = 5
    end
end
if #claims > 0 then redis.call("del", unpack(claims)) end
if #entries > 0 then redis.call("hdel", KEYS[1], unpack(entries)) end
return ends

--- complete
-- KEYS: the hash; the claim. ARGV: the field.
if redis.call("exists", KEYS[2]) == 1 then return 0 end
return redis.call("hdel", KEYS[1], ARGV[1])

--- prepare
-- KEYS: the hash; the claim. ARGV: the field; the value, or "" for the time of the Redis server; the time to live in ms
-- at which a claim no longer keeps the path.
if redis.call("pttl", KEYS[2]) > tonumber(ARGV[3]) then return 0 end
redis.call("del", KEYS[2])
redis.call("hset", KEYS[1], ARGV[1], ARGV[2] == "" and redis.call("time")[1] or ARGV[2])
return 1

--- page_before
-- KEYS: the hash. ARGV: cursor, size, epoch seconds. Leaves out what was prepared then or later. Values with another
-- number of digits are returned, because they may not be times.
local found, before, kept = redis.call("hscan", KEYS[1], ARGV[1], "count", ARGV[2]), ARGV[3], {}
local words, digits, find = found[2], #before, string.find
for n = 2, #words, 2 do
    local value = words[n]
    if #value ~= digits or value < before or find(value, "%D") then
        kept[#kept + 1] = words[n - 1]
        kept[#kept + 1] = value
    end
end
return {found[1], kept}
