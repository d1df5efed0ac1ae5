-- What the learner's scripts, the driver's and a stop share. Loaded after transition.lua, for them only.

-- Whoever was the learner is so no longer, and its reservations are void.
function run.raise_fence()
  redis.call('DEL', run.RESERVED)
  run.add('fence', 1)
  return run.number('fence')
end

function run.not_leased(fence, group_numbers)
  for _, group_number in ipairs(group_numbers) do
    if not run.is_leased_to(run.group_of(group_number), fence) then
      return { 'ERROR', 'group ' .. group_number .. ' is not leased to fence ' .. fence
        .. '; its lease ran out or it is gone' }
    end
  end
  return nil
end

-- Numbers of the groups in PINNED or OLDEST under the versions that `chosen` says, each once.
function run.under(index, chosen)
  local found = {}
  for _, version in ipairs(run.scores_of(index)) do
    if chosen(version) then
      for _, member in ipairs(redis.call('ZRANGEBYSCORE', index, version, version)) do
        found[tonumber(string.match(member, '%d+$'))] = true
      end
    end
  end
  return run.sorted_keys(found)
end

-- Those whose version is at the limit exactly: one batch later it is over.
function run.last_chance(index, view)
  return run.under(index, function(version) return run.lag(view, version) == run.limit('max_lag') end)
end

-- P18, as policy.may_close_early: an open group may do without the members that are still played.
function run.may_close_early(group)
  local most = run.limit('early_missing')
  if most == 0 then return false end
  local running, done = run.slots_in(group, run.RUNNING), run.slots_in(group, run.DONE)
  return #running <= most and #done > 0 and #done >= group.size - most and not run.closing_drop(group)
end

-- P15, as leasing.over_limit: the members that leave their group; with `mask` all of them or none.
function run.over_limit(group, view)
  local mask, done, over = run.limit('mask_over_lag') == 1, 0, {}
  for i, slot in ipairs(group.slots) do
    if slot.state == run.DONE then
      done = done + 1
      if run.is_over(view, mask and slot.newest or slot.oldest) then over[#over + 1] = i end
    end
  end
  return (mask and #over < done) and {} or over
end

-- P5: consumption by a version and its ancestors is final. No group needs to be read: the commit has left nothing but
-- its key and its place among the consumed.
function run.finish_settled(version)
  for _, consumer in ipairs(run.scores_of(run.CONSUMED)) do
    if run.is_ancestor(consumer, version) then
      local consumed = redis.call('ZRANGEBYSCORE', run.CONSUMED, consumer, consumer)
      run.many('ZREM', run.CONSUMED, consumed)
      for _, group_number in ipairs(consumed) do
        run.touched[tonumber(group_number)] = nil
        table.insert(run.dead, run.group_key(group_number))
      end
    end
  end
end

-- P6: what versions off the lineage of `version` consumed comes again.
function run.recall_orphans(version)
  local orphans = {}
  for _, consumer in ipairs(run.scores_of(run.CONSUMED)) do
    if not run.is_ancestor(consumer, version) then
      for _, group_number in ipairs(redis.call('ZRANGEBYSCORE', run.CONSUMED, consumer, consumer)) do
        table.insert(orphans, group_number)
      end
    end
  end
  for _, group in ipairs(run.groups_of(run.by_number(orphans))) do run.recall(group) end
end

-- A stop: nothing stays in flight.
function run.drop_all()
  for _, group in ipairs(run.groups_of(run.all_of(run.OPEN))) do
    run.end_running(group, 'cancelled:stopped')
    run.drop_group(group, 'stopped')
  end
  for _, index in ipairs({ run.READY, run.LEASED }) do
    for _, group in ipairs(run.groups_of(run.all_of(index))) do run.drop_group(group, 'stopped') end
  end
end

-- P8, P12: the ledger is trusted again. Every lease has a fresh term, and so have pins: none is held against its holder
-- for the time that the server was away.
function run.trust()
  run.set('suspect', 0)
  run.set('lost', 0)
  run.set('learner_seen', run.now)
  run.set('retire_after', run.now + math.max(run.number('pin_term_s'), run.limit('dispatch_lease_s')))
  for _, group in ipairs(run.groups_of(run.all_of(run.OPEN))) do
    if group.holder then run.hold(group) end
  end
  for _, group_number in ipairs(run.all_of(run.LEASED)) do
    run.schedule(run.LEASED, group_number, run.now + run.limit('learner_lease_s'))
  end
end
