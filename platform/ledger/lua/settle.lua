-- A complete checkpoint of a version exists: consumption by its ancestors is final (P5), and leaves no key (P10).
-- KEYS: 1 {run}:meta; writes consumed, g:N.  ARGV: fence, version.
-- Reply: OK.
local fence, version = tonumber(ARGV[1]), tonumber(ARGV[2])
begin()
local refusal = fenced(fence)
if refusal then return refusal end
if not node(version) then return { 'ERROR', 'version ' .. version .. ' was never committed' } end
local found = redis.call('ZRANGE', CONSUMED, 0, -1, 'WITHSCORES')
for i = 1, #found, 2 do
  if is_ancestor(tonumber(found[i + 1]), version) then delete_group(found[i]) end
end
return { 'OK' }
