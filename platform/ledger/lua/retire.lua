-- Close a version to new pins, unless somebody holds it (case Q17). Never while the server may have lost pins, nor
-- before their holders have had a term to renew them (P12).
-- KEYS: 1 {run}:meta; writes {run}:pins:N, {run}:retired.  ARGV: seen, version.
-- Reply: OK, revision, 1 when its files may go, else 0.
local pins = run.PREFIX .. 'pins:' .. ARGV[2]
run.is_rewound()
if run.number('suspect') == 1 or run.now < run.number('retire_after') then return run.finish({ 'OK', 0 }) end
if #redis.call('ZRANGEBYSCORE', pins, '(' .. run.seconds_text(run.now), '+inf', 'LIMIT', 0, 1) > 0 then
  return run.finish({ 'OK', 0 })
end
redis.call('DEL', pins)
redis.call('SADD', run.PREFIX .. 'retired', ARGV[2])
return run.finish({ 'OK', 1 })
