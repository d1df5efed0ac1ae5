-- What every transition shares. Loaded in front of each script; the rules are those of policy.py and books.py.
--
-- KEYS[1] is always {run}:meta; all other keys are derived from it and share its hash tag (P4):
--   {run}:meta      hash    head next_number fence sequence dispatched zero_variance score_sum score_count
--                           payload_bytes revision stop_reason fatelog
--   {run}:limits    hash    LedgerLimits, written by the first connection
--   {run}:fates     hash    fate -> attempts            {run}:refused   hash    verdict -> puts
--   {run}:fatelog   list    "group sample attempt fate" of every change of a fate, with " version" if trained; the
--                           last one's position is the field fatelog of {run}:meta
--   {run}:versions  hash    number -> "parent batches fence content_hash"
--   {run}:reserved  hash    staged number -> fence      {run}:heads     stream  wakes those who watch the head
--   {run}:open      zset    group -> deadline           {run}:ready     zset    group -> group
--   {run}:leased    zset    group -> end of the lease   {run}:consumed  zset    group -> consuming version
--   {run}:g:N       hash    one unfinished group (P10): version size dispatched state ended live low high oldest
--                           bytes deliveries fence target consumed_by, and for slot i: i:attempt i:state i:hash
--                           i:payload i:file i:score i:oldest i:fate (absent: attempt 0, running)
--   {run}:clock     string  for tests and simulations only: seconds that stand in for the server's time
--
-- A script that writes fates writes fatelog too.
--
-- A reply is {'OK', ...} or {KIND, message}; KIND is FENCED, REFUSED or ERROR. Scripts never raise on purpose, so that
-- what time alone has changed is kept even when the request itself is refused.

local META = KEYS[1]
local PREFIX = string.sub(META, 1, -5)
local FATES, REFUSED, VERSIONS = PREFIX .. 'fates', PREFIX .. 'refused', PREFIX .. 'versions'
local FATELOG, FATELOG_MOST = PREFIX .. 'fatelog', 1000000
local OPEN, READY = PREFIX .. 'open', PREFIX .. 'ready'
local LEASED, CONSUMED = PREFIX .. 'leased', PREFIX .. 'consumed'
local IN_FLIGHT = 'in_flight'
local NO_VERSION = -1
local SWEPT = '-'
local RUNNING, DONE = false, 'done'

local function group_key(group) return PREFIX .. 'g:' .. group end
local function meta(field) return redis.call('HGET', META, field) end
local function limit(field) return tonumber(redis.call('HGET', PREFIX .. 'limits', field)) end
local function seconds(value) return string.format('%.6f', value) end

local function number(key, field)
  return tonumber(redis.call('HGET', key, field) or 0)
end

local function head()
  return tonumber(meta('head') or NO_VERSION)
end

-- P12: time is the server's.
local function server_time()
  local fixed = redis.call('GET', PREFIX .. 'clock')
  if fixed then return tonumber(fixed) end
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

-- P3: the fates of the slots' present attempts move with the state, in the same step, and each leaves a line.
local function move_fates(group, slots, before, after, version)
  if #slots == 0 then return end
  redis.call('HINCRBY', FATES, before, 0 - #slots)
  redis.call('HINCRBY', FATES, after, #slots)
  redis.call('HINCRBY', META, 'fatelog', #slots)
  local length
  for _, slot in ipairs(slots) do
    local line = { group, slot, number(group_key(group), slot .. ':attempt'), after, version }
    length = redis.call('RPUSH', FATELOG, table.concat(line, ' '))
  end
  if length > FATELOG_MOST then redis.call('LTRIM', FATELOG, length - FATELOG_MOST, -1) end
end

local function dispatch(count)
  redis.call('HINCRBY', META, 'dispatched', count)
  redis.call('HINCRBY', FATES, IN_FLIGHT, count)
end

-- Lineage -------------------------------------------------------------------------------------------------------------

local nodes = {}
local function node(version)
  if nodes[version] == nil then
    local text = redis.call('HGET', VERSIONS, version)
    if not text then return nil end
    local parent, batches = string.match(text, '^(%-?%d+) (%d+) ')
    nodes[version] = { parent = tonumber(parent), batches = tonumber(batches) }
  end
  return nodes[version]
end

-- P14, as policy.path_lag: most + 1 stands for everything above the limit.
local function path_lag(parent, ahead, version, most)
  if not node(parent) or not node(version) then return most + 1 end
  local upper, lower = parent, version
  local total = node(parent).batches + ahead + node(version).batches
  while true do
    local lag = total - node(upper).batches - node(lower).batches
    if lag > most then return most + 1 end
    if upper == lower then return lag end
    if upper > lower then upper = node(upper).parent else lower = node(lower).parent end
    if upper == NO_VERSION or lower == NO_VERSION then return most + 1 end
  end
end

local function is_ancestor(ancestor, version)
  while version > ancestor and node(version) do version = node(version).parent end
  return version == ancestor and node(version) ~= nil
end

local function group_lag(group, parent, ahead, most)
  local worst = 0
  for version in string.gmatch(redis.call('HGET', group_key(group), 'oldest'), '%-?%d+') do
    worst = math.max(worst, path_lag(parent, ahead, tonumber(version), most))
  end
  return worst
end

-- Groups --------------------------------------------------------------------------------------------------------------

-- Servers order groups of one score as texts; decisions, and with them the log of fates, go by number.
local function by_number(groups)
  table.sort(groups, function(one, other) return tonumber(one) < tonumber(other) end)
  return groups
end

local function slots_in(group, state)
  local key, found = group_key(group), {}
  for slot = 0, number(key, 'size') - 1 do
    if redis.call('HGET', key, slot .. ':state') == state then table.insert(found, slot) end
  end
  return found
end

-- Negative counts are written as 0 - n: Lua's -0 is no integer to the server.
local function forget_payload(group, slot, size_bytes)
  redis.call('HDEL', group_key(group), slot .. ':payload')
  redis.call('HINCRBY', group_key(group), 'bytes', 0 - size_bytes)
  redis.call('HINCRBY', META, 'payload_bytes', 0 - size_bytes)
end

-- P10: a finished group leaves no key.
local function delete_group(group)
  local key = group_key(group)
  redis.call('HINCRBY', META, 'payload_bytes', 0 - number(key, 'bytes'))
  for _, index in ipairs({ OPEN, READY, LEASED, CONSUMED }) do redis.call('ZREM', index, group) end
  redis.call('DEL', key)
end

local function drop_group(group, reason)
  move_fates(group, slots_in(group, DONE), IN_FLIGHT, 'dropped:' .. reason)
  delete_group(group)
end

-- Closed, or given back to be delivered again. Never in a stopped run: a stop leaves none open or leased.
local function to_ready(group)
  for _, index in ipairs({ OPEN, LEASED, CONSUMED }) do redis.call('ZREM', index, group) end
  redis.call('HSET', group_key(group), 'state', 'ready')
  redis.call('ZADD', READY, group, group)
end

-- P20: all slots have ended, so the group becomes ready or leaves at once.
local function close_group(group)
  local key = group_key(group)
  local live = number(key, 'live')
  if live < limit('min_group') then
    drop_group(group, 'too_few')
  elseif limit('drop_zero_variance') == 1 and number(key, 'low') == number(key, 'high') then
    redis.call('HINCRBY', META, 'zero_variance', 1)
    drop_group(group, 'zero_variance')
  else
    to_ready(group)
  end
end

local function end_running(group, fate)
  local key, running = group_key(group), slots_in(group, RUNNING)
  move_fates(group, running, IN_FLIGHT, fate)
  for _, slot in ipairs(running) do
    redis.call('HSET', key, slot .. ':state', 'ended', slot .. ':hash', SWEPT)
  end
  redis.call('HSET', key, 'ended', number(key, 'size'))
end

local function is_leased_to(group, fence)
  local found = redis.call('HMGET', group_key(group), 'state', 'fence')
  return found[1] == 'leased' and tonumber(found[2]) == fence
end

-- Beginning -----------------------------------------------------------------------------------------------------------

-- What time alone changes: groups over their deadline (case E7), learner leases that ran out.
local function sweep(now)
  for _, group in ipairs(by_number(redis.call('ZRANGEBYSCORE', OPEN, '-inf', seconds(now)))) do
    end_running(group, 'failed:infrastructure')
    close_group(group)
  end
  for _, group in ipairs(by_number(redis.call('ZRANGEBYSCORE', LEASED, '-inf', seconds(now)))) do to_ready(group) end
end

-- Every transition begins here; the revision of P8 never goes back.
local function begin()
  local now = server_time()
  redis.call('HINCRBY', META, 'revision', 1)
  sweep(now)
  return now
end

local function fenced(fence)
  local present = number(META, 'fence')
  if fence == present then return nil end
  return { 'FENCED', 'fence ' .. fence .. ' is not the present one, ' .. present
    .. ': another learner holds the run, or it was stopped' }
end

-- Whoever was the learner is so no longer, and its reservations are void.
local function raise_fence()
  redis.call('DEL', PREFIX .. 'reserved')
  return redis.call('HINCRBY', META, 'fence', 1)
end

local function not_leased(fence, first)
  for i = first, #ARGV do
    if not is_leased_to(ARGV[i], fence) then
      return { 'ERROR', 'group ' .. ARGV[i] .. ' is not leased to fence ' .. fence
        .. '; its lease ran out or it is gone' }
    end
  end
  return nil
end

local function move_head(version)
  redis.call('HSET', META, 'head', version)
  redis.call('XADD', PREFIX .. 'heads', 'MAXLEN', 16, '*', 'head', version)
end
