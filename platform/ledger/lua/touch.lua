-- A write, for a client that then waits until it is on disk (P11).
-- KEYS: 1 {run}:meta; writes meta.  ARGV: seen.
-- Reply: OK, revision.
return run.transition(function() return { 'OK' } end)
