-- Renew leases; with `exactly`, what is leased and not named comes back: a lost reply had granted it.
-- KEYS: 1 {run}:meta; writes meta, leased, ready, g:N.  ARGV: seen, fence, exactly (0 or 1), then groups.
-- Reply: OK, revision.
local fence, exactly, group_numbers = tonumber(ARGV[2]), ARGV[3] == '1', run.numbers_from(4)
return run.learner_transition(fence, function()
  run.read(group_numbers)
  local refusal = run.not_leased(fence, group_numbers)
  if refusal then return refusal end
  local values, named = {}, {}
  for _, group_number in ipairs(group_numbers) do
    named[group_number] = true
    table.insert(values, run.now + run.limit('learner_lease_s'))
    table.insert(values, group_number)
  end
  run.many('ZADD', run.LEASED, values)
  run.note_due(run.now + run.limit('learner_lease_s'))
  for _, group_number in ipairs(exactly and run.all_of(run.LEASED) or {}) do
    if not named[group_number] then run.to_ready(run.group_of(group_number)) end
  end
  return { 'OK' }
end)
