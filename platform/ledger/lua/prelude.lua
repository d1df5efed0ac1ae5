-- The run's state as every script sees it. Loaded in front of each script, followed by lineage.lua, groups.lua,
-- transition.lua and, for some, learning.lua; the rules are those of policy.py, books.py and the files beside them.
--
-- KEYS[1] is always {run}:meta; all other keys are derived from it and share its hash tag (P4):
--   {run}:meta       hash    head next_number fence holder learner_seen sequence dispatched zero_variance score_sum
--                            score_count payload_bytes protection_lost revision stop_reason fatelog epoch;
--                            server_run and run_revision (of the present server process, and the revision at its
--                            start), suspect and lost (1: see transition.lua), pin_term_s, retire_after (retire.lua);
--                            due (no deadline or lease ends before), limits (packed, for the scripts),
--                            clock (tests and simulations only: seconds that stand in for the server's time)
--   {run}:limits     hash    LedgerLimits, written by the first connection
--   {run}:counts     hash    fate:FATE, refused:VERDICT, lag:LAG -> attempts or puts; seconds:FATE -> seconds of play;
--                            length:KIND:BUCKET -> attempts
--   {run}:fatelog    list    "group sample attempt fate" of every change of a fate, with " version" if trained; the
--                            last one's position is the field fatelog of {run}:meta
--   {run}:versions   hash    number -> "parent batches fence content_hash"
--   {run}:reserved   hash    staged number -> fence     {run}:heads     stream  wakes those who watch the head
--   {run}:g:N        string  one unfinished group (P10), packed: see groups.lua
--   {run}:p:N:I:HASH string  the payload of slot I, from its put to the commit
--   {run}:open       zset    group -> its deadline or the end of its dispatch lease (P2), whichever is sooner
--   {run}:pinned     zset    open group -> its version   {run}:waiting   zset    open group that nobody plays -> itself
--   {run}:ready      zset    group -> itself            {run}:leased    zset    group -> end of the lease
--   {run}:oldest     zset    "VERSION:group" -> version: ready groups by the versions that their lag hangs on
--   {run}:poison     zset    ready group that was delivered too often -> itself
--   {run}:ages       zset    ready group -> when it was dispatched, if the run has a limit of age (P17)
--   {run}:consumed   zset    group -> consuming version
--   {run}:restarts   list    "position restarts" of groups lost to lag (P16)
--   {run}:allowed    hash    environment -> packed list of its versions (P17)
--
-- ARGV[1] is always the highest revision that the client has seen (P8). A reply is {'OK', revision, ...} or
-- {KIND, revision, message}; KIND is REWOUND, FENCED, REFUSED or ERROR. Scripts never raise on purpose, so that what
-- time alone has changed is kept even when the request itself is refused.
--
-- No index is walked as a whole where its size is that of the queue. What a script changes is held back and written
-- once, at its end: a group is unpacked and packed once for all its members.
--
-- Everything shared is a field of `run`. A local for each would be captured by every function anew at every call, which
-- costs several times as much as all the rest of a short script.

local run = {
  IN_FLIGHT = 'in_flight', TRAINED = 'trained', FAILED = 'failed:infrastructure',
  NO_VERSION = -1,
  EPOCH_ATTEMPTS = 1000, EPOCH_FENCES = 1000000, EPOCH_REVISIONS = 1000000000000, -- as in policy.py
  FATELOG_MOST = 1000000,
  CHUNK = 2000, -- most arguments of one call: Lua's stack takes 8000
  meta = {}, meta_changed = {}, log_lines = {},
  counts = { fate = {}, refused = {}, lag = {}, seconds = {}, length = {} },
}

run.META = KEYS[1]
run.PREFIX = string.sub(run.META, 1, -5)
run.COUNTS, run.VERSIONS, run.RESERVED = run.PREFIX .. 'counts', run.PREFIX .. 'versions', run.PREFIX .. 'reserved'
run.RESTARTS, run.FATELOG = run.PREFIX .. 'restarts', run.PREFIX .. 'fatelog'

do
  local flat = redis.call('HGETALL', run.META)
  for i = 1, #flat, 2 do run.meta[flat[i]] = flat[i + 1] end
end

function run.number(field) return tonumber(run.meta[field] or 0) end
function run.set(field, value) run.meta[field], run.meta_changed[field] = value, true end
function run.add(field, amount) run.set(field, run.number(field) + amount) end
function run.head() return tonumber(run.meta.head or run.NO_VERSION) end
function run.stopped() return run.meta.stop_reason ~= nil end

function run.limit(field)
  run.limits = run.limits or cmsgpack.unpack(run.meta.limits)
  return run.limits[field]
end

-- P12: time is the server's.
if run.meta.clock then
  run.now = tonumber(run.meta.clock)
else
  local time = redis.call('TIME')
  run.now = tonumber(time[1]) + tonumber(time[2]) / 1e6
end

-- Call a command with as many arguments as there are.
function run.many(command, key, values)
  for first = 1, #values, run.CHUNK do
    local last = math.min(first + run.CHUNK - 1, #values)
    if key then
      redis.call(command, key, unpack(values, first, last))
    else
      redis.call(command, unpack(values, first, last))
    end
  end
end

-- Servers order members of one score as texts; decisions, and with them the log of fates, go by number.
function run.by_number(members)
  local numbers = {}
  for i, member in ipairs(members) do numbers[i] = tonumber(member) end
  table.sort(numbers)
  return numbers
end

-- Deadlines and leases: `due` spares a look at the indexes until there is something to see.
function run.note_due(at)
  if at < tonumber(run.meta.due or math.huge) then run.set('due', at) end
end

function run.schedule(index, number, at)
  redis.call('ZADD', index, at, number)
  run.note_due(at)
end

function run.all_of(index) return run.by_number(redis.call('ZRANGE', index, 0, -1)) end

function run.sorted_keys(values)
  local keys = {}
  for key in pairs(values) do table.insert(keys, key) end
  table.sort(keys)
  return keys
end

-- The different scores of an index, ascending: one call for each of them, however many members there are.
function run.scores_of(index)
  local found, low = {}, '-inf'
  while true do
    local next_one = redis.call('ZRANGEBYSCORE', index, low, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if #next_one == 0 then return found end
    table.insert(found, tonumber(next_one[2]))
    low = '(' .. next_one[2]
  end
end

-- Counts --------------------------------------------------------------------------------------------------------------

-- By how much a count of {run}:counts changes; they are read and written at the end.
function run.count(kind, name, amount)
  local changes = run.counts[kind]
  changes[name] = (changes[name] or 0) + amount
end

function run.dispatch(attempts)
  run.add('dispatched', attempts)
  run.count('fate', run.IN_FLIGHT, attempts)
end

-- The end -------------------------------------------------------------------------------------------------------------

function run.write_log()
  local lines = run.log_lines
  if #lines == 0 then return end
  run.many('RPUSH', run.FATELOG, lines)
  run.add('fatelog', #lines)
  run.log_lines = {}
  local length = redis.call('LLEN', run.FATELOG)
  if length > run.FATELOG_MOST then redis.call('LTRIM', run.FATELOG, length - run.FATELOG_MOST, -1) end
end

function run.write_counts()
  local fields, changes = {}, {}
  for kind, names in pairs(run.counts) do
    for name, change in pairs(names) do
      if change ~= 0 then
        fields[#fields + 1] = kind .. ':' .. name
        changes[#changes + 1] = change
      end
    end
    run.counts[kind] = {}
  end
  if #fields == 0 then return end
  local values = {}
  for i, before in ipairs(redis.call('HMGET', run.COUNTS, unpack(fields))) do
    values[#values + 1] = fields[i]
    values[#values + 1] = tonumber(before or 0) + changes[i]
  end
  run.many('HSET', run.COUNTS, values)
end

function run.write_meta()
  local changed, removed = {}, {}
  for field in pairs(run.meta_changed) do
    local value = run.meta[field]
    if value == nil then
      removed[#removed + 1] = field
    else
      changed[#changed + 1] = field
      changed[#changed + 1] = value
    end
  end
  run.many('HSET', run.META, changed)
  run.many('HDEL', run.META, removed)
  run.meta_changed = {}
end
