-- Hold a version's files (case Q17).
-- KEYS: 1 {run}:meta; reads {run}:retired, a set of versions; writes {run}:pins:N, a zset of holder -> expiry.
-- ARGV: seen, version, holder, seconds to live.
-- Reply: OK, revision, 1, or 0 when the version was retired.
local version, holder, term_s = ARGV[2], ARGV[3], tonumber(ARGV[4])
if redis.call('SISMEMBER', run.PREFIX .. 'retired', version) == 1 then return run.finish({ 'OK', 0 }) end
redis.call('ZADD', run.PREFIX .. 'pins:' .. version, run.now + term_s, holder)
if term_s > run.number('pin_term_s') then run.set('pin_term_s', term_s) end
return run.finish({ 'OK', 1 })
