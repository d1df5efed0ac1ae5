-- Which running groups should be abandoned (P15).
-- KEYS: 1 {run}:meta; reads versions, g:N.  ARGV: groups.
-- Reply: OK, then group and reason of every one that should.
begin()
local max_lag = limit('max_lag')

local function reason(group)
  local found = redis.call('HMGET', group_key(group), 'state', 'version')
  if found[1] ~= 'open' then return 'stopped' end
  local version = tonumber(found[2])
  if not is_ancestor(version, head()) then return 'rolled_back' end
  -- The next batch starts from the head or later, so this lag can only grow.
  return path_lag(head(), 0, version, max_lag) > max_lag and 'lag' or nil
end

local reply = { 'OK' }
for _, group in ipairs(ARGV) do
  local why = reason(group)
  if why then
    table.insert(reply, group)
    table.insert(reply, why)
  end
end
return reply
