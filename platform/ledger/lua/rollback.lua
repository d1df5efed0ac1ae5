-- Make a version the head again; what others than its ancestors consumed comes again (P6).
-- KEYS: 1 {run}:meta; writes meta, counts, fatelog, heads, leased, consumed, ready, g:N.  ARGV: seen, fence, version.
-- Reply: OK, revision.
local fence, version = tonumber(ARGV[2]), tonumber(ARGV[3])
return run.learner_transition(fence, function()
  if not run.node(version) then return run.never_committed(version) end
  run.set('stop_reason', nil)
  for _, group in ipairs(run.groups_of(run.all_of(run.LEASED))) do run.to_ready(group) end
  run.recall_orphans(version)
  run.move_head(version)
  return { 'OK' }
end)
