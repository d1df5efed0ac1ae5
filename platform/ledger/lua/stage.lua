-- Reserve a version number that was never used before and is at least `floor` (P6).
-- KEYS: 1 {run}:meta; writes meta, reserved.  ARGV: seen, fence, floor.
-- Reply: OK, revision, number.
local fence, floor = tonumber(ARGV[2]), tonumber(ARGV[3])
return run.learner_transition(fence, function()
  local version = math.max(run.number('next_number'), floor)
  run.set('next_number', version + 1)
  redis.call('HSET', run.RESERVED, version, fence)
  return { 'OK', version }
end)
