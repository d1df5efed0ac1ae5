-- How groups end, what time alone changes, and the frame of every script. Loaded after groups.lua.

function run.drop_group(group, reason)
  for _, i in ipairs(run.slots_in(group, run.DONE)) do run.move(group, i, 'dropped:' .. reason) end
  run.finish_group(group)
end

function run.is_protected(group)
  return run.limit('lag_restarts') > 0 and group.restarts >= run.limit('lag_restarts')
end

-- P16: a group was lost to lag as a whole. Its task is played again, the last time under protection.
function run.lost_to_lag(group)
  if run.is_protected(group) then run.add('protection_lost', 1) end
  if group.restarts < run.limit('lag_restarts') and not run.stopped() then
    redis.call('RPUSH', run.RESTARTS, group.position .. ' ' .. group.restarts + 1)
  end
end

-- P20, as policy.closing_drop: why a group whose slots have all ended leaves at once, or nil.
function run.closing_drop(group)
  local done = run.slots_in(group, run.DONE)
  if #done < run.limit('min_group') then return 'too_few' end
  if run.limit('drop_zero_variance') == 1 and not run.has_variance(group, done) then return 'zero_variance' end
  return nil
end

-- All slots have ended: the group becomes ready, or leaves for the reason returned.
function run.close_group(group)
  local reason = run.closing_drop(group)
  if reason == 'zero_variance' then run.add('zero_variance', 1) end
  if reason then run.drop_group(group, reason) else run.to_ready(group) end
  return reason
end

function run.end_running(group, fate)
  for _, i in ipairs(run.slots_in(group, run.RUNNING)) do
    run.move(group, i, fate)
    run.end_slot(group, i, run.SWEPT)
  end
end

-- P2: nobody plays the group any more. Its running attempts have failed, and their slots wait for another holder.
function run.end_dispatch(group)
  local waits = false
  for _, i in ipairs(run.slots_in(group, run.RUNNING)) do
    run.move(group, i, run.FAILED)
    if run.may_retry(group, i) then
      run.next_attempt(group, i)
      run.dispatch(1)
      waits = true
    else
      run.end_slot(group, i, run.SWEPT)
    end
  end
  if not waits then return run.close_group(group) end
  group.holder = nil
  run.schedule(run.OPEN, group.number, group.deadline)
  redis.call('ZADD', run.WAITING, group.number, group.number)
end

-- Why nothing that is sampled from a version can be trained any more, or nil: the next batch starts from the head or
-- later, so this lag can only grow (P15).
function run.hopeless(version)
  if not run.is_ancestor(version, run.head()) then return 'rolled_back' end
  return run.is_over(run.view(run.head(), 0), version) and 'lag' or nil
end

local function due_in(index)
  return run.groups_of(run.by_number(redis.call('ZRANGEBYSCORE', index, '-inf', run.now)))
end

-- What time alone changes: groups over their deadline (case E7), dispatch leases and learner leases that ran out.
function run.sweep()
  if run.now < tonumber(run.meta.due or math.huge) then return end
  local open = due_in(run.OPEN)
  for _, group in ipairs(open) do
    if group.deadline <= run.now then
      run.end_running(group, run.FAILED)
      run.close_group(group)
    end
  end
  for _, group in ipairs(open) do
    if group.state == 'open' then run.end_dispatch(group) end
  end
  for _, group in ipairs(due_in(run.LEASED)) do run.to_ready(group) end
  run.set('due', nil)
  for _, index in ipairs({ run.OPEN, run.LEASED }) do
    local first = redis.call('ZRANGE', index, 0, 0, 'WITHSCORES')
    if first[2] then run.note_due(tonumber(first[2])) end
  end
end

function run.fenced(fence)
  if fence ~= run.number('fence') then
    return { 'FENCED', 'fence ' .. fence .. ' is not the present one, ' .. run.number('fence')
      .. ': another learner holds the run, or it was stopped' }
  end
  run.set('learner_seen', run.now)
  return nil
end

function run.numbers_from(first)
  local found = {}
  for i = first, #ARGV do table.insert(found, tonumber(ARGV[i])) end
  return found
end

function run.seconds_text(value) return string.format('%.17g', value) end

-- The frame -----------------------------------------------------------------------------------------------------------

function run.finish(reply)
  run.write_groups()
  run.write_log()
  run.write_counts()
  run.write_meta()
  table.insert(reply, 2, run.number('revision'))
  return reply
end

-- A client has seen writes that are gone: only a reconciliation makes the ledger trusted again.
function run.lose()
  run.set('suspect', 1)
  run.set('lost', 1)
end

-- P8: the server has restarted, or a client has seen more of the run than there is.
function run.is_rewound()
  if tonumber(ARGV[1]) > run.number('revision') then run.lose() end
  return run.number('suspect') == 1
end

function run.step(body)
  run.add('revision', 1)
  run.sweep()
  return run.finish(body())
end

function run.rewound()
  return run.finish({ 'REWOUND', 'its server restarted or lost writes: it waits to be reconciled with the manifests' })
end

-- A transition: `body` gives the reply, without the revision.
function run.transition(body)
  if run.is_rewound() then return run.rewound() end
  return run.step(body)
end

-- A transition of the present learner.
function run.learner_transition(fence, body)
  return run.transition(function() return run.fenced(fence) or body() end)
end

-- A read that a ledger which must be reconciled answers as well, without a change.
function run.look(body)
  if run.is_rewound() then return run.finish(body()) end
  return run.step(body)
end
