-- A holder is gone: its dispatch leases end now (P2). Looks at every open group: workers do not die often.
-- KEYS: 1 {run}:meta; writes meta, counts, fatelog, waiting, open, g:N.  ARGV: seen, holder.
-- Reply: OK, revision.
local holder = ARGV[2]
return run.transition(function()
  for _, group in ipairs(run.groups_of(run.all_of(run.OPEN))) do
    if group.holder == holder then run.end_dispatch(group) end
  end
  return { 'OK' }
end)
