-- Drop leased groups for a reason that the learner found (P3).
-- KEYS: 1 {run}:meta; writes meta, counts, fatelog, leased, g:N, p:N:I:HASH.  ARGV: seen, fence, reason, then groups.
-- Reply: OK, revision.
local fence, reason, group_numbers = tonumber(ARGV[2]), ARGV[3], run.numbers_from(4)
return run.learner_transition(fence, function()
  local refusal = run.not_leased(fence, group_numbers)
  if refusal then return refusal end
  for _, group_number in ipairs(group_numbers) do
    -- A group may be named twice.
    local group = run.group_of(group_number)
    if group then run.drop_group(group, reason) end
  end
  return { 'OK' }
end)
