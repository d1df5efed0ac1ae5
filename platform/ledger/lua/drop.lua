-- Drop leased groups for a reason that the learner found (P3).
-- KEYS: 1 {run}:meta; writes fates, leased, g:N.  ARGV: fence, reason, then groups.
-- Reply: OK.
local fence = tonumber(ARGV[1])
begin()
local refusal = fenced(fence) or not_leased(fence, 3)
if refusal then return refusal end
for i = 3, #ARGV do
  -- A group may be named twice.
  if is_leased_to(ARGV[i], fence) then drop_group(ARGV[i], ARGV[2]) end
end
return { 'OK' }
