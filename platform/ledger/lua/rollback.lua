-- Make a version the head again; what others than its ancestors consumed comes again (P6).
-- KEYS: 1 {run}:meta; writes meta, fates, heads, leased, consumed, ready, g:N.  ARGV: fence, version.
-- Reply: OK.
local fence, version = tonumber(ARGV[1]), tonumber(ARGV[2])
begin()
local refusal = fenced(fence)
if refusal then return refusal end
if not node(version) then return { 'ERROR', 'version ' .. version .. ' was never committed' } end
redis.call('HDEL', META, 'stop_reason')
for _, group in ipairs(redis.call('ZRANGE', LEASED, 0, -1)) do requeue(group) end
local found = redis.call('ZRANGE', CONSUMED, 0, -1, 'WITHSCORES')
for i = 1, #found, 2 do
  local group = found[i]
  local key = group_key(group)
  if not is_ancestor(tonumber(found[i + 1]), version) then
    for slot = 0, number(key, 'size') - 1 do
      local fate = redis.call('HGET', key, slot .. ':fate')
      if fate then
        move_fate(1, fate, IN_FLIGHT)
        redis.call('HDEL', key, slot .. ':fate')
      end
    end
    requeue(group)
  end
end
move_head(version)
return { 'OK' }
