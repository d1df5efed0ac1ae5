-- Renew dispatch leases (P2), and say which running groups should be abandoned (P15).
-- KEYS: 1 {run}:meta; reads versions, g:N; writes meta, open.  ARGV: seen, holder, groups.
-- Reply: OK, revision, then group and reason of every one that should be.
local holder, group_numbers = ARGV[2], run.numbers_from(3)

local function reason_to_stop(group)
  if not group or group.state ~= 'open' then return 'stopped' end
  if group.holder ~= holder then return 'superseded' end
  run.hold(group)
  local reason = run.hopeless(group.version)
  -- P15: newer tokens of the same episode may be within the limit.
  if reason == 'lag' and run.limit('mask_over_lag') == 1 then return nil end
  return reason
end

return run.transition(function()
  run.read(group_numbers)
  local reply = { 'OK' }
  for _, group_number in ipairs(group_numbers) do
    local reason = reason_to_stop(run.group_of(group_number))
    if reason then
      table.insert(reply, group_number)
      table.insert(reply, reason)
    end
  end
  return reply
end)
