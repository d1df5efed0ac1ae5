-- Admit nothing more, take the run from its learner, and close the books on all that is not consumed.
-- KEYS: 1 {run}:meta; writes meta, counts, fatelog, reserved, restarts, open, ready, leased, g:N, p:N:I:HASH.
-- ARGV: seen, reason.
-- Reply: OK, revision.
return run.transition(function()
  run.set('stop_reason', ARGV[2])
  run.set('holder', nil)
  run.raise_fence()
  redis.call('DEL', run.RESTARTS)
  run.drop_all()
  return { 'OK' }
end)
