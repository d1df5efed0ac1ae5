-- Lease a batch: all or nothing, after what cannot be trained has left (P14, P20).
-- KEYS: 1 {run}:meta; writes meta, counts, fatelog, restarts, open, ready, oldest, poison, ages, leased, g:N,
--       p:N:I:HASH.
-- ARGV: seen, fence, parent, ahead, count.
-- Reply: OK, revision, then the group as it is packed (groups.lua) and its lag, of every one.
local fence, parent, ahead, count_wanted = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local view = run.view(parent, ahead)

-- P15: what is over the lag limit leaves, oldest group first; it costs what it evicts.
local function evict()
  local over = run.under(run.OLDEST, function(version) return run.is_over(view, version) end)
  for _, group in ipairs(run.groups_of(over)) do
    local leaving = run.over_limit(group, view)
    for _, i in ipairs(leaving) do
      run.move(group, i, 'dropped:lag')
      run.end_slot(group, i, group.slots[i].hash)
    end
    if #leaving > 0 then
      local reason = run.closing_drop(group)
      if not reason then
        run.to_ready(group)
      elseif reason == 'zero_variance' then
        run.add('zero_variance', 1)
        run.drop_group(group, reason)
      else
        run.drop_group(group, 'lag')
        run.lost_to_lag(group)
      end
    end
  end
end

-- P18: groups that are complete but for a few members and have no later chance are closed, if that makes a batch.
local function close_early()
  local closing = {}
  for _, group in ipairs(run.groups_of(run.last_chance(run.PINNED, view))) do
    if run.may_close_early(group) then table.insert(closing, group) end
  end
  if #closing == 0 or redis.call('ZCARD', run.READY) + #closing < count_wanted then return false end
  for _, group in ipairs(closing) do
    run.end_running(group, 'cancelled:lag')
    run.close_group(group)
  end
  return true
end

-- Poison (P3, case Q24) and age (P17) leave, until the next groups are free of them.
local function drop_unfit()
  local oldest = '(' .. run.seconds_text(run.now - run.limit('max_age_s'))
  while true do
    local last = tonumber(redis.call('ZRANGE', run.READY, count_wanted - 1, count_wanted - 1)[1] or math.huge)
    local unfit = {}
    if run.limit('max_age_s') > 0 then
      for _, group_number in ipairs(run.by_number(redis.call('ZRANGEBYSCORE', run.AGES, '-inf', oldest))) do
        if group_number <= last then unfit[group_number] = 'age' end
      end
    end
    for _, group_number in ipairs(run.by_number(redis.call('ZRANGEBYSCORE', run.POISON, '-inf', last))) do
      unfit[group_number] = 'poison'
    end
    if next(unfit) == nil then return end
    for _, group in ipairs(run.groups_of(run.sorted_keys(unfit))) do
      run.drop_group(group, unfit[group.number])
    end
  end
end

local function reported_lag(group)
  local worst = 0
  for _, slot in ipairs(group.slots) do
    if slot.state == run.DONE then
      worst = math.max(worst, math.min(run.lag(view, slot.oldest), run.limit('max_lag')))
    end
  end
  return worst
end

local function lease()
  local reply, target = { 'OK' }, run.node(parent).batches + ahead
  local group_numbers = run.by_number(redis.call('ZRANGE', run.READY, 0, count_wanted - 1))
  for _, group in ipairs(run.groups_of(group_numbers)) do
    run.to_leased(group, fence, target)
    local packed = cmsgpack.pack(group)
    run.packed[group.number] = packed
    table.insert(reply, packed)
    table.insert(reply, reported_lag(group))
  end
  return reply
end

return run.learner_transition(fence, function()
  if not run.node(parent) then return run.never_committed(parent) end
  evict()
  if count_wanted < 1 then return { 'OK' } end
  if close_early() then evict() end
  drop_unfit()
  return redis.call('ZCARD', run.READY) >= count_wanted and lease() or { 'OK' }
end)
