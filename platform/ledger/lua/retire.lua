-- Close a version to new pins, unless somebody holds it (case Q17).
-- KEYS: 1 {run}:meta; writes {run}:pins:N, {run}:retired.  ARGV: version.
-- Reply: OK, 1 when its files may go, else 0.
local pins = PREFIX .. 'pins:' .. ARGV[1]
redis.call('ZREMRANGEBYSCORE', pins, '-inf', seconds(server_time()))
if redis.call('EXISTS', pins) == 1 then return { 'OK', 0 } end
redis.call('SADD', PREFIX .. 'retired', ARGV[1])
return { 'OK', 1 }
