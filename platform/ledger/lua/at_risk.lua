-- Groups whose last chance is the batch that starts at `parent`, `ahead` batches on, and that are not in it (P15, P16);
-- those that would be closed early (P18) are no loss.
-- KEYS: 1 {run}:meta; reads pinned, ready, oldest, g:N.  ARGV: seen, fence, parent, ahead, count.
-- Reply: OK, revision, open ones, ready ones, protected ones among both.
local fence, parent, ahead, count_wanted = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local view = run.view(parent, ahead)

-- The lag that decides when a group leaves: of its oldest member, or with `mask` of its newest token.
local function deciding_lag(group)
  local found
  for _, version in ipairs(group.keys) do
    local lag = run.lag(view, version)
    if not found then
      found = lag
    elseif run.limit('mask_over_lag') == 1 then
      found = math.min(found, lag)
    else
      found = math.max(found, lag)
    end
  end
  return found
end

return run.learner_transition(fence, function()
  if not run.node(parent) then return run.never_committed(parent) end
  local playing, ready, protected = 0, 0, 0
  for _, group in ipairs(run.groups_of(run.last_chance(run.PINNED, view))) do
    if not run.may_close_early(group) then
      playing = playing + 1
      if run.is_protected(group) then protected = protected + 1 end
    end
  end
  local batch = count_wanted > 0 and redis.call('ZRANGE', run.READY, 0, count_wanted - 1) or {}
  local last = tonumber(batch[#batch] or -1)
  for _, group in ipairs(run.groups_of(run.last_chance(run.OLDEST, view))) do
    if group.number > last and deciding_lag(group) == run.limit('max_lag') then
      ready = ready + 1
      if run.is_protected(group) then protected = protected + 1 end
    end
  end
  return { 'OK', playing, ready, protected }
end)
