-- Reserve room for groups (P19, P20).
-- KEYS: 1 {run}:meta; writes meta, fates, open, g:N.  ARGV: version, size, groups.
-- Reply: OK, refusal, then group, dispatched, deadline of every ticket.
local version, size, wanted = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now = begin()
if meta('stop_reason') then return { 'OK', 'stopped' } end
if head() == NO_VERSION then return { 'OK', 'no_head' } end

local max_lag, batch = limit('max_lag'), limit('batch_groups')
local lag = path_lag(head(), 0, version, max_lag)
if lag > max_lag or not is_ancestor(version, head()) then return { 'OK', 'stale_version' } end

local used = redis.call('ZCARD', OPEN) + redis.call('ZCARD', READY) + redis.call('ZCARD', LEASED)
local room = math.max(max_lag - lag + 1, 1) * batch - used
if room <= 0 then return { 'OK', 'capacity' } end

local reply = { 'OK', '' }
local dispatched, deadline = seconds(now), seconds(now + limit('group_deadline_s'))
for _ = 1, math.min(room, wanted) do
  local group = redis.call('HINCRBY', META, 'sequence', 1) - 1
  redis.call('HSET', group_key(group), 'version', version, 'size', size, 'dispatched', dispatched, 'state', 'open')
  redis.call('ZADD', OPEN, deadline, group)
  dispatch(size)
  for _, value in ipairs({ group, dispatched, deadline }) do table.insert(reply, value) end
end
return reply
