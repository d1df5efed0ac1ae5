-- Renew leases.
-- KEYS: 1 {run}:meta; writes leased.  ARGV: fence, then groups.
-- Reply: OK.
local fence = tonumber(ARGV[1])
local now = begin()
local refusal = fenced(fence) or not_leased(fence, 2)
if refusal then return refusal end
local lease_until = seconds(now + limit('learner_lease_s'))
for i = 2, #ARGV do redis.call('ZADD', LEASED, lease_until, ARGV[i]) end
return { 'OK' }
