-- Give leased groups back; those that are no longer leased are passed over.
-- KEYS: 1 {run}:meta; writes meta, leased, ready, g:N.  ARGV: seen, fence, then groups.
-- Reply: OK, revision.
local fence, group_numbers = tonumber(ARGV[2]), run.numbers_from(3)
return run.learner_transition(fence, function()
  run.read(group_numbers)
  for _, group_number in ipairs(group_numbers) do
    local group = run.group_of(group_number)
    if run.is_leased_to(group, fence) then run.to_ready(group) end
  end
  return { 'OK' }
end)
