-- Unfinished groups: where they are kept, which indexes name them, and how fates move. Loaded after lineage.lua.
--
-- A group is a table, packed under {run}:g:N: number, version, size, position and restarts (P16), base (its first
-- attempt number), dispatched, deadline, state, holder (of an open one; absent: it waits for one), deliveries, fence
-- and target (of a leased one), by (which version consumed it), environment (P17), keys (its versions in {run}:oldest
-- while it is ready), and slots.
--
-- A slot has attempt and state; began, when its present attempt was given out (absent: nobody plays it, or nobody
-- knows), and retried, if that was in the reply to its predecessor's put; seconds, how long the attempt was played;
-- what an episode left: hash, file, score, oldest, newest, bytes (while there is a payload); fate, once it has ended,
-- and lag, once it was consumed. redis_replies.py reads some of this.

run.OPEN, run.PINNED = run.PREFIX .. 'open', run.PREFIX .. 'pinned'
run.WAITING = run.PREFIX .. 'waiting'
run.READY, run.OLDEST = run.PREFIX .. 'ready', run.PREFIX .. 'oldest'
run.POISON, run.AGES = run.PREFIX .. 'poison', run.PREFIX .. 'ages'
run.LEASED, run.CONSUMED = run.PREFIX .. 'leased', run.PREFIX .. 'consumed'

run.RUNNING, run.DONE, run.ENDED = 'running', 'done', 'ended'
run.SWEPT = '-'

-- What was read; what must be written; packed groups, where a script needed them before the end; keys to delete; the
-- first part of a fate.
run.groups, run.touched, run.packed, run.dead, run.kinds = {}, {}, {}, {}, {}

function run.group_key(number_of) return run.PREFIX .. 'g:' .. number_of end
function run.payload_key(group_number, i, hash)
  return run.PREFIX .. 'p:' .. group_number .. ':' .. i - 1 .. ':' .. hash
end

function run.touch(group) run.touched[group.number] = group end

function run.read(numbers)
  local keys, wanted = {}, {}
  for _, wanted_number in ipairs(numbers) do
    if run.groups[wanted_number] == nil then
      table.insert(wanted, wanted_number)
      table.insert(keys, run.group_key(wanted_number))
    end
  end
  for first = 1, #keys, run.CHUNK do
    local last = math.min(first + run.CHUNK - 1, #keys)
    for i, packed in ipairs(redis.call('MGET', unpack(keys, first, last))) do
      run.groups[wanted[first + i - 1]] = packed and cmsgpack.unpack(packed) or false
    end
  end
end

-- The group, or nil; numbers are numbers, not texts.
function run.group_of(wanted)
  if run.groups[wanted] == nil then run.read({ wanted }) end
  return run.groups[wanted] or nil
end

-- The groups of these numbers, all of which exist.
function run.groups_of(numbers)
  run.read(numbers)
  local found = {}
  for i, wanted in ipairs(numbers) do found[i] = run.groups[wanted] end
  return found
end

-- A slot whose attempt is running; nobody plays it yet.
function run.new_slot(attempt) return { attempt = attempt, state = run.RUNNING } end

function run.new_group(fields)
  local group = {
    deliveries = 0, restarts = 0, fence = 0, target = 0, by = run.NO_VERSION, environment = '', keys = {}, slots = {},
  }
  for name, value in pairs(fields) do group[name] = value end
  for i = 1, group.size do group.slots[i] = run.new_slot(group.base) end
  run.groups[group.number] = group
  run.touch(group)
  return group
end

-- Slots -------------------------------------------------------------------------------------------------------------

function run.slots_in(group, state)
  local found = {}
  for i, slot in ipairs(group.slots) do
    if slot.state == state then table.insert(found, i) end
  end
  return found
end

function run.forget_payload(group, i)
  local slot = group.slots[i]
  if not slot.bytes then return end
  run.add('payload_bytes', -slot.bytes)
  slot.bytes = nil
  table.insert(run.dead, run.payload_key(group.number, i, slot.hash))
end

-- As policy.length_bucket: 2 * log2 of the seconds, rounded down; exact where a logarithm need not be.
function run.length_bucket(seconds)
  if seconds <= 0 then return -8 end
  local fraction, exponent = math.frexp(seconds)
  local bucket = 2 * (exponent - 1) + (fraction * fraction >= 0.5 and 1 or 0)
  return math.max(-8, math.min(40, bucket))
end

-- P16: count the lag and the length of a final fate, or (amount -1) take them back. Attempts whose length nobody knows
-- have none.
function run.tally(slot, amount)
  local fate, seconds = slot.fate, slot.seconds
  if fate == run.TRAINED then run.count('lag', slot.lag, amount) end
  if not fate or not seconds then return end
  run.count('seconds', fate, amount * seconds)
  local kind = run.kinds[fate]
  if not kind then
    kind = string.match(fate, '^[^:]+')
    run.kinds[fate] = kind
  end
  run.count('length', kind .. ':' .. run.length_bucket(seconds), amount)
end

-- How long the slot's present attempt was played, or nil.
function run.played(slot)
  return slot.seconds or slot.began and math.max(run.now - slot.began, 0)
end

-- P3: the fate of an attempt moves in the same step as its state, and leaves a line.
function run.move_slot(group_number, i, slot, fate, version)
  local fates = run.counts.fate
  local before = slot.fate or run.IN_FLIGHT
  fates[before] = (fates[before] or 0) - 1
  fates[fate] = (fates[fate] or 0) + 1
  if slot.fate then run.tally(slot, -1) end
  slot.fate, slot.seconds = fate ~= run.IN_FLIGHT and fate or nil, run.played(slot)
  run.tally(slot, 1)
  local line = group_number .. ' ' .. i - 1 .. ' ' .. slot.attempt .. ' ' .. fate
  local lines = run.log_lines
  lines[#lines + 1] = version and line .. ' ' .. version or line
end

function run.move(group, i, fate, version)
  run.move_slot(group.number, i, group.slots[i], fate, version)
  run.touch(group)
end

-- The present attempt leaves no episode, or no longer. The hash of one that did stays: the same put is a duplicate.
function run.end_slot(group, i, hash)
  run.forget_payload(group, i)
  group.slots[i].state, group.slots[i].hash = run.ENDED, hash
  run.touch(group)
end

function run.next_attempt(group, i)
  local attempt = group.slots[i].attempt + 1
  group.slots[i] = run.new_slot(attempt)
  run.touch(group)
  return attempt
end

function run.may_retry(group, i) return group.slots[i].attempt + 1 - group.base < run.limit('max_attempts') end

function run.has_variance(group, slots)
  for _, i in ipairs(slots) do
    if group.slots[i].score ~= group.slots[slots[1]].score then return true end
  end
  return false
end

-- Where a group is ----------------------------------------------------------------------------------------------------

-- The versions that a ready group's lag hangs on (P14, P15): the oldest of each member, or with `mask` the newest. All
-- of them: after a rollback the smallest number need not be the farthest.
function run.deciding_versions(group)
  local found, known = {}, {}
  local place = run.limit('mask_over_lag') == 1 and 'newest' or 'oldest'
  for _, i in ipairs(run.slots_in(group, run.DONE)) do
    local version = group.slots[i][place]
    if not known[version] then
      known[version] = true
      table.insert(found, version)
    end
  end
  return found
end

function run.leave(group)
  if group.state == 'open' then
    redis.call('ZREM', run.OPEN, group.number)
    redis.call('ZREM', run.PINNED, group.number)
    if not group.holder then redis.call('ZREM', run.WAITING, group.number) end
  elseif group.state == 'ready' then
    redis.call('ZREM', run.READY, group.number)
    for _, version in ipairs(group.keys) do redis.call('ZREM', run.OLDEST, version .. ':' .. group.number) end
    if group.deliveries >= run.limit('max_deliveries') then redis.call('ZREM', run.POISON, group.number) end
    if run.limit('max_age_s') > 0 then redis.call('ZREM', run.AGES, group.number) end
  elseif group.state == 'leased' then
    redis.call('ZREM', run.LEASED, group.number)
  elseif group.state == 'consumed' then
    redis.call('ZREM', run.CONSUMED, group.number)
  end
end

-- P2: the group's dispatch lease begins, or goes on.
function run.hold(group)
  run.schedule(run.OPEN, group.number, math.min(group.deadline, run.now + run.limit('dispatch_lease_s')))
end

-- Closed, or given back to be delivered again. Never in a stopped run: a stop leaves none open or leased.
function run.to_ready(group)
  run.leave(group)
  group.state = 'ready'
  redis.call('ZADD', run.READY, group.number, group.number)
  group.keys = run.deciding_versions(group)
  for _, version in ipairs(group.keys) do redis.call('ZADD', run.OLDEST, version, version .. ':' .. group.number) end
  if group.deliveries >= run.limit('max_deliveries') then redis.call('ZADD', run.POISON, group.number, group.number) end
  if run.limit('max_age_s') > 0 then redis.call('ZADD', run.AGES, group.dispatched, group.number) end
  run.touch(group)
end

function run.to_leased(group, fence, target)
  run.leave(group)
  group.state, group.fence, group.target = 'leased', fence, target
  group.deliveries = group.deliveries + 1
  run.schedule(run.LEASED, group.number, run.now + run.limit('learner_lease_s'))
  run.touch(group)
end

function run.to_consumed(group, version)
  run.leave(group)
  group.state, group.by, group.deliveries = 'consumed', version, 0
  redis.call('ZADD', run.CONSUMED, version, group.number)
  run.touch(group)
end

-- P10: a finished group leaves no key.
function run.finish_group(group)
  run.leave(group)
  for i in ipairs(group.slots) do run.forget_payload(group, i) end
  group.state = 'finished'
  run.touched[group.number], run.groups[group.number] = nil, false
  table.insert(run.dead, run.group_key(group.number))
end

-- P6: what consumed the group is no longer on the lineage, and its episodes come again.
function run.recall(group)
  for _, i in ipairs(run.slots_in(group, run.DONE)) do
    run.move(group, i, run.IN_FLIGHT)
  end
  run.to_ready(group)
end

function run.is_leased_to(group, fence)
  return group ~= nil and group.state == 'leased' and group.fence == fence
end

function run.write_groups()
  local values = {}
  for group_number, group in pairs(run.touched) do
    values[#values + 1] = run.group_key(group_number)
    values[#values + 1] = run.packed[group_number] or cmsgpack.pack(group)
  end
  run.many('MSET', nil, values)
  run.many('DEL', nil, run.dead)
end
