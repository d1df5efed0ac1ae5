-- Lease a batch: all or nothing, after what cannot be trained has left (P14, P20).
-- KEYS: 1 {run}:meta; writes fates, ready, leased, g:N.  ARGV: fence, parent, ahead, count.
-- Reply: OK, then per group: group, version, lag, deliveries, dispatched, and a list with sample, attempt, payload,
--        store file, score, oldest version of every member.
local fence, parent, ahead, count = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now = begin()
local refusal = fenced(fence)
if refusal then return refusal end
if not node(parent) then
  return { 'ERROR', 'version ' .. parent .. ' was never committed; it cannot be the parent of a batch' }
end

local max_lag, max_deliveries = limit('max_lag'), limit('max_deliveries')
local lags = {}
for _, group in ipairs(redis.call('ZRANGE', READY, 0, -1)) do
  lags[group] = group_lag(group, parent, ahead, max_lag)
  if lags[group] > max_lag then
    drop_group(group, 'lag')
  elseif number(group_key(group), 'deliveries') >= max_deliveries then
    drop_group(group, 'poison')
  end
end

local reply = { 'OK' }
if count < 1 or redis.call('ZCARD', READY) < count then return reply end

local function members(key)
  local list = {}
  for slot = 0, number(key, 'size') - 1 do
    local found = redis.call('HMGET', key, slot .. ':state', slot .. ':attempt', slot .. ':payload', slot .. ':file',
      slot .. ':score', slot .. ':oldest')
    if found[1] == 'done' then
      for _, value in ipairs({ slot, found[2] or 0, found[3] or '', found[4], found[5], found[6] }) do
        table.insert(list, value)
      end
    end
  end
  return list
end

local lease_until = seconds(now + limit('learner_lease_s'))
for _, group in ipairs(redis.call('ZRANGE', READY, 0, count - 1)) do
  local key = group_key(group)
  redis.call('HSET', key, 'state', 'leased', 'fence', fence, 'target', node(parent).batches + ahead)
  redis.call('ZREM', READY, group)
  redis.call('ZADD', LEASED, lease_until, group)
  local deliveries = redis.call('HINCRBY', key, 'deliveries', 1)
  local found = redis.call('HMGET', key, 'version', 'dispatched')
  for _, value in ipairs({ group, found[1], lags[group], deliveries, found[2] }) do table.insert(reply, value) end
  table.insert(reply, members(key))
end
return reply
