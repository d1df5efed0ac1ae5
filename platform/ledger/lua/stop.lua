-- Admit nothing more, take the run from its learner, and close the books on all that is not consumed.
-- KEYS: 1 {run}:meta; writes meta, reserved, fates, open, ready, leased, g:N.  ARGV: reason.
-- Reply: OK.
begin()
redis.call('HSET', META, 'stop_reason', ARGV[1])
raise_fence()
for _, group in ipairs(by_number(redis.call('ZRANGE', OPEN, 0, -1))) do
  end_running(group, 'cancelled:stopped')
  drop_group(group, 'stopped')
end
for _, group in ipairs(redis.call('ZRANGE', READY, 0, -1)) do drop_group(group, 'stopped') end
for _, group in ipairs(by_number(redis.call('ZRANGE', LEASED, 0, -1))) do drop_group(group, 'stopped') end
return { 'OK' }
