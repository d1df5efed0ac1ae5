-- Publish a version (P5) if all preconditions of P7 hold.
-- KEYS: 1 {run}:meta; writes meta, counts, fatelog, versions, reserved, heads, leased, consumed, g:N, p:N:I:HASH.
-- ARGV: seen, fence, number, parent, content hash, batches, then a packed list: group and, of every attempt named, in
--       order, (sample, attempt, fate).
-- Reply: OK, revision.
local fence, version, parent = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local content_hash, batches, fates = ARGV[5], tonumber(ARGV[6]), cmsgpack.unpack(ARGV[7])

local function refuse(message) return { 'REFUSED', message } end

-- Lags for the batch that the group was leased for, however far past the commit's parent that began (P14).
local function view_of(group, before) return run.view(parent, math.max(group.target - before, 0)) end

local function covers(group, named)
  local n = 0
  for i, slot in ipairs(group.slots) do
    if slot.state == run.DONE then
      n = n + 1
      if not named[n] or named[n][1] ~= i - 1 or named[n][2] ~= slot.attempt then return false end
    end
  end
  return n == #named
end

-- Every group leased to this fence, every delivered attempt named once, lag within the limit.
local function refusal_of(before)
  for _, told in ipairs(fates) do
    local group = run.group_of(told[1])
    if not run.is_leased_to(group, fence) then return 'group ' .. told[1] .. ' is not leased to fence ' .. fence end
    if not covers(group, told[2]) then
      return 'the fates of group ' .. told[1] .. ' do not cover exactly the attempts that were leased'
    end
    if #run.over_limit(group, view_of(group, before)) > 0 then
      return 'group ' .. told[1] .. ' is over the lag limit of ' .. run.limit('max_lag')
    end
  end
  return nil
end

local function consume(group, named, before)
  local view, most = view_of(group, before), run.limit('max_lag')
  for _, told in ipairs(named) do
    local i, fate = told[1] + 1, told[3]
    local slot = group.slots[i]
    slot.lag = math.min(run.lag(view, slot.oldest), most)
    run.move(group, i, fate, fate == run.TRAINED and version or nil)
    run.forget_payload(group, i) -- P9: the episode store has it
  end
  run.to_consumed(group, version)
end

return run.transition(function()
  local known = run.node(version)
  if known then
    -- The reply to this very commit may have been lost.
    if known.fence == fence and known.content_hash == content_hash then return { 'OK' } end
    return refuse('version ' .. version .. ' is already committed with another content or fence')
  end
  local refusal = run.fenced(fence)
  if refusal then return refusal end
  if parent ~= run.head() then return refuse('parent ' .. parent .. ' is not the head, ' .. run.head()) end
  if tonumber(redis.call('HGET', run.RESERVED, version) or -1) ~= fence then
    return refuse('version ' .. version .. ' was not reserved under fence ' .. fence)
  end
  local before = parent == run.NO_VERSION and 0 or run.node(parent).batches
  local numbers = {}
  for i, told in ipairs(fates) do numbers[i] = told[1] end
  run.read(numbers)
  local reason = refusal_of(before)
  if reason then return refuse(reason) end
  for _, told in ipairs(fates) do consume(run.group_of(told[1]), told[2], before) end
  run.add_version(version, parent, before + batches, fence, content_hash)
  redis.call('HDEL', run.RESERVED, version)
  run.set('zero_variance', 0)
  run.move_head(version)
  return { 'OK' }
end)
