-- Admit nothing more, and close the books on all that nobody will finish or fetch.
-- KEYS: 1 {run}:meta; writes meta, fates, open, ready, g:N.  ARGV: reason.
-- Reply: OK.
begin()
redis.call('HSET', META, 'stop_reason', ARGV[1])
for _, group in ipairs(by_number(redis.call('ZRANGE', OPEN, 0, -1))) do
  end_running(group, 'cancelled:stopped')
  drop_group(group, 'stopped')
end
for _, group in ipairs(redis.call('ZRANGE', READY, 0, -1)) do drop_group(group, 'stopped') end
return { 'OK' }
