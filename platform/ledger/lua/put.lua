-- End attempts (P2).
-- KEYS: 1 {run}:meta; writes meta, fates, refused, open, ready, g:N.
-- ARGV: eleven per submission: group, sample, attempt, outcome, fate (unless done), retryable (0 or 1), payload hash,
--       payload, store file, score, oldest version.
-- Reply: OK, then verdict and next attempt per submission.

local function note_done(key, slot, sub)
  redis.call('HSET', key, slot .. ':state', 'done', slot .. ':hash', sub.hash, slot .. ':payload', sub.payload,
    slot .. ':file', sub.file, slot .. ':score', sub.score, slot .. ':oldest', sub.oldest)
  local score = tonumber(sub.score)
  local seen = redis.call('HMGET', key, 'low', 'high', 'oldest')
  if not seen[1] or score < tonumber(seen[1]) then redis.call('HSET', key, 'low', sub.score) end
  if not seen[2] or score > tonumber(seen[2]) then redis.call('HSET', key, 'high', sub.score) end
  local versions = ',' .. (seen[3] or '') .. ','
  if not string.find(versions, ',' .. sub.oldest .. ',', 1, true) then
    redis.call('HSET', key, 'oldest', seen[3] and (seen[3] .. ',' .. sub.oldest) or sub.oldest)
  end
  redis.call('HINCRBY', key, 'live', 1)
  redis.call('HINCRBY', key, 'bytes', #sub.payload)
  redis.call('HINCRBY', META, 'payload_bytes', #sub.payload)
  redis.call('HINCRBYFLOAT', META, 'score_sum', sub.score)
  redis.call('HINCRBY', META, 'score_count', 1)
end

local function end_attempt(group, slot, attempt, sub)
  local key = group_key(group)
  if sub.outcome == 'done' then
    note_done(key, slot, sub)
  else
    move_fates(group, { slot }, IN_FLIGHT, sub.fate)
    if sub.outcome == 'failed' and sub.retryable and attempt + 1 < limit('max_attempts') then
      redis.call('HSET', key, slot .. ':attempt', attempt + 1)
      dispatch(1)
      return 'retry', attempt + 1
    end
    redis.call('HSET', key, slot .. ':state', 'ended', slot .. ':hash', sub.hash)
  end
  if redis.call('HINCRBY', key, 'ended', 1) == number(key, 'size') then close_group(group) end
  return 'accepted', 0
end

local function put_one(group, slot, attempt, sub)
  local found = redis.call('HMGET', group_key(group), 'size', 'state', slot .. ':attempt', slot .. ':state',
    slot .. ':hash')
  if not found[1] then
    local known = tonumber(group) >= 0 and tonumber(group) < number(META, 'sequence')
    return known and 'late' or 'conflict', 0
  end
  if tonumber(slot) < 0 or tonumber(slot) >= tonumber(found[1]) then return 'conflict', 0 end
  local present = tonumber(found[3] or 0)
  if attempt < present then
    -- The reply that named the present attempt may have been lost, and nobody else would play it (P7's manner).
    if attempt + 1 == present and not found[4] and sub.outcome == 'failed' then return 'retry', present end
    return 'superseded', 0
  end
  if attempt > present then return 'conflict', 0 end
  if not found[4] then return end_attempt(group, slot, attempt, sub) end
  if found[5] == sub.hash then return 'duplicate', 0 end
  if found[2] ~= 'open' and found[4] == 'ended' then return 'group_closed', 0 end
  return 'conflict', 0
end

begin()
local reply = { 'OK' }
for i = 1, #ARGV, 11 do
  local sub = { outcome = ARGV[i + 3], fate = ARGV[i + 4], retryable = ARGV[i + 5] == '1', hash = ARGV[i + 6],
    payload = ARGV[i + 7], file = ARGV[i + 8], score = ARGV[i + 9], oldest = ARGV[i + 10] }
  local verdict, next_attempt = put_one(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), sub)
  if verdict ~= 'accepted' and verdict ~= 'retry' then redis.call('HINCRBY', REFUSED, verdict, 1) end
  table.insert(reply, verdict)
  table.insert(reply, next_attempt)
end
return reply
