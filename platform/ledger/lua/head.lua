-- The committed head; for those who watch it. Changes nothing.
-- KEYS: 1 {run}:meta.  ARGV: seen.
-- Reply: OK, revision, head (-1: none).
if run.is_rewound() then return run.rewound() end
return run.finish({ 'OK', run.head() })
