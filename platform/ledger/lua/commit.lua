-- Publish a version (P5) if all preconditions of P7 hold.
-- KEYS: 1 {run}:meta; writes meta, fates, versions, reserved, heads, leased, consumed, g:N.
-- ARGV: fence, number, parent, content hash, batches, then group, sample, attempt, fate of every attempt named, sorted.
-- Reply: OK.
local fence, version, parent = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local content_hash, batches = ARGV[4], tonumber(ARGV[5])
local FIRST, WIDTH = 6, 4
begin()

local function refuse(message) return { 'REFUSED', message } end

local known = redis.call('HGET', VERSIONS, version)
if known then
  -- The reply to this very commit may have been lost.
  if string.match(known, '^%-?%d+ %d+ (.*)$') == fence .. ' ' .. content_hash then return { 'OK' } end
  return refuse('version ' .. version .. ' is already committed with another content or fence')
end
local refusal = fenced(fence)
if refusal then return refusal end
if parent ~= head() then return refuse('parent ' .. parent .. ' is not the head, ' .. head()) end
if tonumber(redis.call('HGET', PREFIX .. 'reserved', version) or -1) ~= fence then
  return refuse('version ' .. version .. ' was not reserved under fence ' .. fence)
end

-- Every group leased to this fence, every delivered attempt named once, lag within the limit.
local before = parent == NO_VERSION and 0 or node(parent).batches
local max_lag = limit('max_lag')
local named = {}
for i = FIRST, #ARGV, WIDTH do
  local group, slot = ARGV[i], ARGV[i + 1]
  local key = group_key(group)
  if named[group] == nil then
    if not is_leased_to(group, fence) then return refuse('group ' .. group .. ' is not leased to fence ' .. fence) end
    local ahead = math.max(number(key, 'target') - before, 0)
    if group_lag(group, parent, ahead, max_lag) > max_lag then
      return refuse('group ' .. group .. ' is over the lag limit of ' .. max_lag)
    end
    named[group] = 0
  end
  if redis.call('HGET', key, slot .. ':state') == 'done'
    and number(key, slot .. ':attempt') == tonumber(ARGV[i + 2]) then
    named[group] = named[group] + 1
  else
    named[group] = -#ARGV
  end
end
for group, count in pairs(named) do
  if count ~= number(group_key(group), 'live') then
    return refuse('the fates of group ' .. group .. ' do not cover exactly the attempts that were leased')
  end
end

for i = FIRST, #ARGV, WIDTH do
  local key, slot, fate = group_key(ARGV[i]), ARGV[i + 1], ARGV[i + 3]
  move_fates(ARGV[i], { slot }, IN_FLIGHT, fate, fate == 'trained' and version or nil)
  -- P9: the episode store has the payload.
  forget_payload(ARGV[i], slot, redis.call('HSTRLEN', key, slot .. ':payload'))
  redis.call('HSET', key, slot .. ':fate', fate)
end
for group in pairs(named) do
  redis.call('HSET', group_key(group), 'state', 'consumed', 'deliveries', 0)
  redis.call('ZREM', LEASED, group)
  redis.call('ZADD', CONSUMED, version, group)
end
redis.call('HSET', VERSIONS, version, parent .. ' ' .. (before + batches) .. ' ' .. fence .. ' ' .. content_hash)
redis.call('HDEL', PREFIX .. 'reserved', version)
redis.call('HSET', META, 'zero_variance', 0)
move_head(version)
return { 'OK' }
