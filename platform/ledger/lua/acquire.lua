-- Become the learner: a new fence; leases and reservations of the old one are void.
-- KEYS: 1 {run}:meta; writes meta, reserved, leased, ready, g:N.  ARGV: holder.
-- Reply: OK, fence.
begin()
redis.call('HSET', META, 'holder', ARGV[1])
for _, group in ipairs(by_number(redis.call('ZRANGE', LEASED, 0, -1))) do to_ready(group) end
return { 'OK', raise_fence() }
