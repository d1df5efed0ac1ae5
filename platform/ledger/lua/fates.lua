-- Changes of fates after a position, oldest first; what lies at or before it is forgotten (P3).
-- KEYS: 1 {run}:meta; writes meta, fatelog.  ARGV: seen, after, limit.
-- Reply: OK, revision, position of the last one, then a line for each.
local after, most = tonumber(ARGV[2]), tonumber(ARGV[3])
return run.transition(function()
  -- What the sweep has just decided comes last.
  run.write_log()
  local newest = run.number('fatelog')
  if after > newest then
    return { 'ERROR', 'position ' .. after .. ' lies past the end of the fate log, ' .. newest }
  end
  local before = newest - redis.call('LLEN', run.FATELOG)
  if after > before then
    redis.call('LTRIM', run.FATELOG, after - before, -1)
    before = after
  end
  local lines = redis.call('LRANGE', run.FATELOG, 0, most - 1)
  local reply = { 'OK', #lines > 0 and before + #lines or after }
  for _, line in ipairs(lines) do table.insert(reply, line) end
  return reply
end)
