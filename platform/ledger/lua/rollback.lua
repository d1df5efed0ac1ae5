-- Make a version the head again; what others than its ancestors consumed comes again (P6).
-- KEYS: 1 {run}:meta; writes meta, fates, heads, leased, consumed, ready, g:N.  ARGV: fence, version.
-- Reply: OK.
local fence, version = tonumber(ARGV[1]), tonumber(ARGV[2])
begin()
local refusal = fenced(fence)
if refusal then return refusal end
if not node(version) then return { 'ERROR', 'version ' .. version .. ' was never committed' } end
redis.call('HDEL', META, 'stop_reason')
for _, group in ipairs(by_number(redis.call('ZRANGE', LEASED, 0, -1))) do to_ready(group) end
for _, group in ipairs(by_number(redis.call('ZRANGE', CONSUMED, 0, -1))) do
  if not is_ancestor(tonumber(redis.call('ZSCORE', CONSUMED, group)), version) then
    local key = group_key(group)
    for _, slot in ipairs(slots_in(group, DONE)) do
      move_fates(group, { slot }, redis.call('HGET', key, slot .. ':fate'), IN_FLIGHT)
      redis.call('HDEL', key, slot .. ':fate')
    end
    to_ready(group)
  end
end
move_head(version)
return { 'OK' }
