-- Every count, from one step (P3).
-- KEYS: 1 {run}:meta; reads meta, fates, refused, versions, open, ready, leased, consumed.  ARGV: none.
-- Reply: OK, flat fates, flat refusals, head, batches of the head, open, ready, leased, consumed, stopped (0 or 1),
--        then fence, sequence, dispatched, zero_variance, score_sum, score_count, payload_bytes, revision.
begin()
local present = head()
return {
  'OK',
  redis.call('HGETALL', FATES),
  redis.call('HGETALL', REFUSED),
  present,
  present == NO_VERSION and 0 or node(present).batches,
  redis.call('ZCARD', OPEN),
  redis.call('ZCARD', READY),
  redis.call('ZCARD', LEASED),
  redis.call('ZCARD', CONSUMED),
  meta('stop_reason') and 1 or 0,
  redis.call('HMGET', META, 'fence', 'sequence', 'dispatched', 'zero_variance', 'score_sum', 'score_count',
    'payload_bytes', 'revision'),
}
