-- Hold a version's files (case Q17).
-- KEYS: 1 {run}:meta; reads {run}:retired, a set of versions; writes {run}:pins:N, a zset of holder -> expiry.
-- ARGV: version, holder, seconds to live.
-- Reply: OK, 1, or 0 when the version was retired.
if redis.call('SISMEMBER', PREFIX .. 'retired', ARGV[1]) == 1 then return { 'OK', 0 } end
redis.call('ZADD', PREFIX .. 'pins:' .. ARGV[1], seconds(server_time() + tonumber(ARGV[3])), ARGV[2])
return { 'OK', 1 }
