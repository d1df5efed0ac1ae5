-- A complete checkpoint of a version exists: consumption by its ancestors is final (P5), and leaves no key (P10).
-- KEYS: 1 {run}:meta; writes meta, consumed, g:N.  ARGV: seen, fence, version.
-- Reply: OK, revision.
local fence, version = tonumber(ARGV[2]), tonumber(ARGV[3])
return run.learner_transition(fence, function()
  if not run.node(version) then return run.never_committed(version) end
  run.finish_settled(version)
  return { 'OK' }
end)
