-- End attempts (P2).
-- KEYS: 1 {run}:meta; reads allowed; writes meta, counts, fatelog, open, ready, restarts, g:N; deletes p:N:I:HASH that
--       were written just before, in the same step, and are not wanted.
-- ARGV: seen, a packed list of submissions. A submission is a map: group, sample, attempt, outcome, fate (unless done),
--       retryable, hash, file, score, oldest and newest version, environment, bytes (of its payload).
-- Reply: OK, revision, then verdict and next attempt per submission.

local function is_allowed(environment)
  local name, version = string.match(environment, '^(.*)@(.-)$')
  local packed = name and redis.call('HGET', run.PREFIX .. 'allowed', name)
  if not packed then return true end
  for _, known in ipairs(cmsgpack.unpack(packed)) do
    if known == version then return true end
  end
  return false
end

-- P17: an environment that is not allowed, or another one than that of a sibling, is not trained on.
local allowed = { [''] = true }
local function may_join(group, environment)
  if allowed[environment] == nil then allowed[environment] = is_allowed(environment) end
  return environment == '' or allowed[environment] and (group.environment == '' or group.environment == environment)
end

local function keep(group, i, sub)
  local slot = group.slots[i]
  run.add('score_sum', sub.score)
  run.add('score_count', 1)
  if not may_join(group, sub.environment) then
    run.move(group, i, 'dropped:environment')
    return run.end_slot(group, i, sub.hash)
  end
  if group.environment == '' then group.environment = sub.environment end
  slot.state, slot.hash, slot.file, slot.score = run.DONE, sub.hash, sub.file, sub.score
  slot.oldest, slot.newest, slot.seconds = sub.oldest, sub.newest, run.played(slot)
  if sub.bytes > 0 then
    slot.bytes = sub.bytes
    run.add('payload_bytes', sub.bytes)
  end
  run.touch(group)
end

-- From the last slot on, for members mostly end in order.
local function is_played(group)
  for i = group.size, 1, -1 do
    if group.slots[i].state == run.RUNNING then return true end
  end
  return false
end

local function end_attempt(group, i, sub)
  if sub.outcome == 'done' then
    keep(group, i, sub)
  else
    run.move(group, i, sub.fate)
    if sub.outcome == 'failed' and sub.retryable and run.may_retry(group, i) then
      local attempt = run.next_attempt(group, i)
      group.slots[i].began, group.slots[i].retried = run.now, true
      run.dispatch(1)
      return 'retry', attempt
    end
    run.end_slot(group, i, sub.hash)
  end
  if not is_played(group) then
    local reason = run.close_group(group)
    if sub.fate == 'cancelled:lag' and reason == 'too_few' then run.lost_to_lag(group) end
  end
  return 'accepted', 0
end

local function put_one(group, sub)
  if not group then
    return sub.group >= 0 and sub.group < run.number('sequence') and 'late' or 'conflict', 0
  end
  local slot = group.slots[sub.sample + 1]
  if not slot then return 'conflict', 0 end
  local running = slot.state == run.RUNNING
  if sub.attempt < slot.attempt then
    -- The reply that named the present attempt may have been lost, and nobody else would play it (P7's manner).
    local follows = sub.attempt + 1 == slot.attempt and slot.retried
    if follows and running and sub.outcome == 'failed' then return 'retry', slot.attempt end
    return 'superseded', 0
  end
  if sub.attempt > slot.attempt then return 'conflict', 0 end
  if running then
    -- Nobody was given this attempt: it is one that a ledger gave out before it lost its last writes.
    if not group.holder then return 'superseded', 0 end
    return end_attempt(group, sub.sample + 1, sub)
  end
  if slot.hash == sub.hash then return 'duplicate', 0 end
  if group.state ~= 'open' and slot.state == run.ENDED then return 'group_closed', 0 end
  return 'conflict', 0
end

local submissions, group_numbers = cmsgpack.unpack(ARGV[2]), {}
for i, sub in ipairs(submissions) do group_numbers[i] = sub.group end
run.read(group_numbers)

-- The payloads came before the script: those that no slot holds go again.
local function forget_refused()
  for _, sub in ipairs(submissions) do
    local group = run.group_of(sub.group)
    local slot = group and group.slots[sub.sample + 1]
    if sub.bytes > 0 and not (slot and slot.bytes and slot.hash == sub.hash) then
      table.insert(run.dead, run.payload_key(sub.group, sub.sample + 1, sub.hash))
    end
  end
end

if run.is_rewound() then
  forget_refused()
  return run.rewound()
end
return run.step(function()
  local reply = { 'OK' }
  for _, sub in ipairs(submissions) do
    local verdict, attempt = put_one(run.group_of(sub.group), sub)
    if verdict ~= 'accepted' and verdict ~= 'retry' then run.count('refused', verdict, 1) end
    reply[#reply + 1] = verdict
    reply[#reply + 1] = attempt
  end
  forget_refused()
  return reply
end)
