-- Reserve room for groups (P19, P20).
-- KEYS: 1 {run}:meta; writes meta, counts, fatelog, open, pinned, waiting, restarts, g:N.
-- ARGV: seen, version, size, groups, holder.
-- Reply: OK, revision, refusal, a packed list: group, position, size, version, dispatched, deadline and a list of
--        (sample, attempt) of every ticket.
local version, size, wanted, holder = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local tickets = {}

local function give(group)
  group.holder = holder
  run.hold(group)
  local attempts = {}
  for _, i in ipairs(run.slots_in(group, run.RUNNING)) do
    group.slots[i].began = run.now
    table.insert(attempts, { i - 1, group.slots[i].attempt })
  end
  run.touch(group)
  table.insert(tickets, {
    group.number, group.position, group.size, group.version, group.dispatched, group.deadline, attempts,
  })
end

-- P18: groups whose worker is gone; they have their room. Those that can no longer be trained end here (P15).
local function give_waiting()
  for _, group_number in ipairs(run.all_of(run.WAITING)) do
    if #tickets >= wanted then return end
    local group = run.group_of(group_number)
    local reason = run.hopeless(group.version)
    if reason then
      run.end_running(group, 'cancelled:' .. reason)
      run.drop_group(group, 'lag')
      if reason == 'lag' then run.lost_to_lag(group) end
    else
      redis.call('ZREM', run.WAITING, group_number)
      give(group)
    end
  end
end

local function room()
  if run.hopeless(version) then return 0, 'stale_version' end
  local used = redis.call('ZCARD', run.OPEN) + redis.call('ZCARD', run.READY) + redis.call('ZCARD', run.LEASED)
  local batches = math.max(run.limit('max_lag') - run.lag(run.view(run.head(), 0), version) + 1, 1)
  local free = math.max(batches * run.limit('batch_groups') - used, 0)
  return free, free == 0 and 'capacity' or ''
end

-- P16: tasks that were lost to lag come before new ones.
local function next_place()
  local lost = redis.call('LPOP', run.RESTARTS)
  if not lost then return run.number('sequence'), 0 end
  local position, restarts = string.match(lost, '^(%d+) (%d+)$')
  return tonumber(position), tonumber(restarts)
end

local function give_new()
  local position, restarts = next_place()
  local group = run.new_group({
    state = 'open', number = run.number('sequence'), position = position, restarts = restarts, version = version,
    size = size, base = run.number('epoch') * run.EPOCH_ATTEMPTS, dispatched = run.now,
    deadline = run.now + run.limit('group_deadline_s'),
  })
  run.add('sequence', 1)
  run.dispatch(size)
  redis.call('ZADD', run.PINNED, version, group.number)
  give(group)
end

return run.transition(function()
  if run.stopped() then return { 'OK', 'stopped', cmsgpack.pack({}) } end
  if run.head() == run.NO_VERSION then return { 'OK', 'no_head', cmsgpack.pack({}) } end
  give_waiting()
  local free, refusal = room()
  for _ = 1, math.min(wanted - #tickets, free) do give_new() end
  return { 'OK', #tickets == 0 and refusal or '', cmsgpack.pack(tickets) }
end)
