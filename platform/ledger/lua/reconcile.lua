-- Take in what the manifest chain says, in a new epoch (P8), as rebuilding.py.
-- KEYS: 1 {run}:meta; writes everything but limits and pins.
-- ARGV: seen, the packed chain (a map as records.delivery.Chain).
-- Reply: OK, revision.
local chain = cmsgpack.unpack(ARGV[2])

-- The slot's present attempt is not in the chain, so it will never be trained.
local function abandon(group, i)
  local slot = group.slots[i]
  if slot.state == run.RUNNING then
    run.move(group, i, run.FAILED)
    run.end_slot(group, i, run.SWEPT)
  elseif slot.state == run.DONE then
    run.move(group, i, 'dropped:stopped')
    run.end_slot(group, i, slot.hash)
  end
end

-- Attempts of which nothing is known any more.
local function lose(group_number, i, first, last)
  for attempt = first, last do
    run.dispatch(1)
    run.move_slot(group_number, i, run.new_slot(attempt), run.FAILED)
  end
end

-- Bring the slot to `attempt`; whatever was tried in between was lost with the ledger's last writes.
local function catch_up(group, i, attempt)
  local slot = group.slots[i]
  if slot.attempt == attempt then
    if slot.state == run.ENDED then
      -- A new learner dropped it, and did not live to say so in a manifest of its own.
      slot.state = string.match(slot.fate, '^dropped:') and run.DONE or run.RUNNING
      run.move(group, i, run.IN_FLIGHT)
    end
    return
  end
  abandon(group, i)
  lose(group.number, i, math.max(slot.attempt + 1, attempt - attempt % run.EPOCH_ATTEMPTS), attempt - 1)
  run.dispatch(1)
  group.slots[i] = run.new_slot(attempt)
end

local function fill(group, i, member)
  local slot = group.slots[i]
  if slot.state == run.RUNNING then
    -- Its put was lost, and when it comes again it is a duplicate.
    run.add('score_sum', member.score)
    run.add('score_count', 1)
    slot.seconds = run.played(slot)
  end
  run.forget_payload(group, i) -- P9: the episode store has it
  slot.state, slot.lag = run.DONE, member.lag
  slot.hash, slot.file, slot.score = member.payload_hash, member.store_file, member.score
  slot.oldest, slot.newest = member.oldest_version, member.newest_version
end

-- An attempt in flight gets the fate that the chain states.
local function consume(group, i, member, version)
  fill(group, i, member)
  run.move(group, i, member.fate, member.fate == run.TRAINED and version or nil)
end

local function consume_known(group, told)
  if group.state == 'consumed' then
    if group.by == told.consumed_by or run.is_ancestor(group.by, chain.head) then return end
    run.recall(group)
  end
  local members = {}
  for _, member in ipairs(told.members) do members[member.sample + 1] = member end
  for i = 1, group.size do
    local member = members[i]
    if member then
      catch_up(group, i, member.attempt)
      consume(group, i, member, told.consumed_by)
    else
      abandon(group, i)
    end
  end
  run.to_consumed(group, told.consumed_by)
end

-- The group is not in the books: enter it as consumed. `counted`: its fates are in the counts already.
local function create(told, counted)
  local group = run.new_group({
    number = told.group, position = told.position, version = told.version, size = told.size, base = 0,
    dispatched = run.now, deadline = run.now, state = 'new',
  })
  for i, slot in ipairs(group.slots) do slot.state, slot.hash, slot.attempt = run.ENDED, run.SWEPT, 0 end
  local lowest
  for _, member in ipairs(told.members) do
    local i = member.sample + 1
    group.slots[i] = run.new_slot(member.attempt)
    lowest = math.min(lowest or member.attempt, member.attempt)
    if counted then
      fill(group, i, member)
      group.slots[i].fate = member.fate
      run.tally(group.slots[i], 1)
    else
      run.dispatch(1)
      consume(group, i, member, told.consumed_by)
    end
  end
  group.base = (lowest or 0) - (lowest or 0) % run.EPOCH_ATTEMPTS
  run.to_consumed(group, told.consumed_by)
  run.set('sequence', math.max(run.number('sequence'), told.group + 1))
end

-- Groups that were dispatched after the last write that survived, and that no version consumed.
local function count_lost(before, size, base)
  for group_number = before, run.number('sequence') - 1 do
    if not run.group_of(group_number) then
      for i = 1, size do lose(group_number, i, base, base) end
    end
  end
end

local function begin_epoch()
  run.set('epoch', chain.epoch)
  run.set('revision', chain.epoch * run.EPOCH_REVISIONS)
  run.set('run_revision', run.number('revision')) -- what clients saw before is made up for: they need not say so again
  run.set('fence', math.max(run.number('fence'), chain.epoch * run.EPOCH_FENCES))
  run.set('holder', nil)
  run.set('next_number', math.max(run.number('next_number'), chain.next_number))
  redis.call('DEL', run.RESERVED)
end

local function take_versions()
  for _, version in ipairs(chain.versions) do
    if not run.node(version.number) then
      run.add_version(version.number, version.parent, version.batches, version.fence, version.content_hash)
    end
  end
end

local function take_groups(empty, before)
  table.sort(chain.consumed, function(one, other)
    if one.consumed_by ~= other.consumed_by then return one.consumed_by < other.consumed_by end
    return one.group < other.group
  end)
  for _, told in ipairs(chain.consumed) do
    local group = run.group_of(told.group)
    if group then
      consume_known(group, told)
    elseif told.group >= before then
      create(told, empty)
    end
  end
end

local function reconcile()
  local empty = redis.call('EXISTS', run.VERSIONS) == 0
  local before, lost_base = run.number('sequence'), run.number('epoch') * run.EPOCH_ATTEMPTS
  begin_epoch()
  take_versions()
  if empty then
    for fate, amount in pairs(chain.fates) do
      run.count('fate', fate, amount)
      run.add('dispatched', amount)
    end
    run.set('sequence', chain.sequence)
  end
  take_groups(empty, before)
  if #chain.consumed > 0 and not empty then count_lost(before, chain.consumed[1].size, lost_base) end
  run.finish_settled(chain.settled)
  run.recall_orphans(chain.head)
  for _, group in ipairs(run.groups_of(run.all_of(run.LEASED))) do run.to_ready(group) end
  if run.stopped() then run.drop_all() end
  run.move_head(chain.head)
  run.trust()
  return { 'OK' }
end

run.is_rewound()
if chain.epoch <= run.number('epoch') then
  return run.finish({ 'ERROR', 'epoch ' .. chain.epoch .. ' is not above ' .. run.number('epoch')
    .. ', in which the ledger was reconciled already' })
end
return run.finish(reconcile())
