-- Give leased groups back; those that are no longer leased are passed over.
-- KEYS: 1 {run}:meta; writes leased, ready, g:N.  ARGV: fence, then groups.
-- Reply: OK.
local fence = tonumber(ARGV[1])
begin()
local refusal = fenced(fence)
if refusal then return refusal end
for i = 2, #ARGV do
  if is_leased_to(ARGV[i], fence) then to_ready(ARGV[i]) end
end
return { 'OK' }
