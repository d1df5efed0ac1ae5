-- Reserve a version number that was never used before (P6).
-- KEYS: 1 {run}:meta; writes meta, reserved.  ARGV: fence.
-- Reply: OK, number.
local fence = tonumber(ARGV[1])
begin()
local refusal = fenced(fence)
if refusal then return refusal end
-- Numbers start at 0: the field holds the next one.
local version = redis.call('HINCRBY', META, 'next_number', 1) - 1
redis.call('HSET', PREFIX .. 'reserved', version, fence)
return { 'OK', version }
