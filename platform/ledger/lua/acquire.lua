-- Become the learner: a new fence; leases and reservations of the old one are void.
-- KEYS: 1 {run}:meta; writes meta, reserved, leased, ready, g:N.  ARGV: seen, holder, takeover (0 or 1).
-- Reply: OK, revision, fence.
local holder, takeover = ARGV[2], ARGV[3] == '1'
return run.transition(function()
  local silent_s = run.now - run.number('learner_seen')
  if run.meta.holder and run.meta.holder ~= holder and silent_s < run.limit('learner_term_s') and not takeover then
    return { 'FENCED', string.format('the run is held by learner %s, last heard of %.1f s ago; end it first, or wait'
      .. ' until it has said nothing for %g s', run.meta.holder, silent_s, run.limit('learner_term_s')) }
  end
  for _, group in ipairs(run.groups_of(run.all_of(run.LEASED))) do run.to_ready(group) end
  run.set('holder', holder)
  run.set('learner_seen', run.now)
  return { 'OK', run.raise_fence() }
end)
