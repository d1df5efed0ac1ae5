-- Write the run's limits, or compare them with those that the run has.
-- KEYS: 1 {run}:meta, and {run}:limits.  ARGV: pairs of field, value.
-- Reply: OK, then field, found, wanted of every limit that differs.
local reply = { 'OK' }
local key = PREFIX .. 'limits'
if redis.call('EXISTS', key) == 0 then
  for i = 1, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
end
for i = 1, #ARGV, 2 do
  local found = redis.call('HGET', key, ARGV[i]) or 'nothing'
  if found ~= ARGV[i + 1] then
    for _, text in ipairs({ ARGV[i], found, ARGV[i + 1] }) do table.insert(reply, text) end
  end
end
return reply
