-- Changes of fates after a position, oldest first; what lies at or before it is forgotten (P3).
-- KEYS: 1 {run}:meta; writes {run}:fatelog.  ARGV: after, limit.
-- Reply: OK, position of the last one, then a line for each.
local after, most = tonumber(ARGV[1]), tonumber(ARGV[2])
begin()
local newest = number(META, 'fatelog')
if after > newest then
  return { 'ERROR', 'position ' .. after .. ' lies past the end of the fate log, ' .. newest }
end
local before = newest - redis.call('LLEN', FATELOG)
if after > before then
  redis.call('LTRIM', FATELOG, after - before, -1)
  before = after
end
local lines = redis.call('LRANGE', FATELOG, 0, most - 1)
local reply = { 'OK', #lines > 0 and before + #lines or after }
for _, line in ipairs(lines) do table.insert(reply, line) end
return reply
