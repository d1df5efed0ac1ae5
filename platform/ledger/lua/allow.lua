-- Which versions of an environment episodes may come from (P17).
-- KEYS: 1 {run}:meta; writes allowed.  ARGV: seen, environment, then its versions.
-- Reply: OK, revision.
return run.transition(function()
  local versions = {}
  for i = 3, #ARGV do table.insert(versions, ARGV[i]) end
  redis.call('HSET', run.PREFIX .. 'allowed', ARGV[2], cmsgpack.pack(versions))
  return { 'OK' }
end)
