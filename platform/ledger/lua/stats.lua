-- Every count, from one step (P3).
-- KEYS: 1 {run}:meta; reads meta, counts, versions and the sizes of the indexes.  ARGV: seen.
-- Reply: OK, revision, flat counts, batches of the head, open, ready, leased, consumed, waiting, restarts, now, flat
--        meta.
return run.look(function()
  run.write_log()
  run.write_counts()
  run.write_meta()
  return {
    'OK',
    redis.call('HGETALL', run.COUNTS),
    run.head() == run.NO_VERSION and 0 or run.node(run.head()).batches,
    redis.call('ZCARD', run.OPEN),
    redis.call('ZCARD', run.READY),
    redis.call('ZCARD', run.LEASED),
    redis.call('ZCARD', run.CONSUMED),
    redis.call('ZCARD', run.WAITING),
    redis.call('LLEN', run.RESTARTS),
    run.seconds_text(run.now),
    redis.call('HGETALL', run.META), -- with `limits`, which is no text
  }
end)
