-- After a restart: trust the ledger again, if it has lost nothing as far as this client can tell (P8, P12).
-- KEYS: 1 {run}:meta; reads versions; writes meta, held, leased and what time changes.
-- ARGV: seen, number and content hash of the newest manifest (-1: none).
-- Reply: OK, revision, 1 or 0.
local newest, content_hash = tonumber(ARGV[2]), ARGV[3]
local known = newest == run.NO_VERSION or (run.node(newest) and run.node(newest).content_hash == content_hash)
if not known or run.number('lost') == 1 or tonumber(ARGV[1]) > run.number('revision') then
  return run.finish({ 'OK', 0 })
end
run.trust()
return run.step(function() return { 'OK', 1 } end)
