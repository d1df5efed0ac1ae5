-- A connection begins. Write the run's limits, or compare them with those that the run has; notice a server that has
-- restarted, and a client that saw more of the run before the restart than was there after it (P8).
-- KEYS: 1 {run}:meta; writes meta, limits.
-- ARGV: seen, run id of the server that the client saw that on (empty: none), then pairs of field, value (or none).
-- Reply: OK, revision, run id of this server, then field, found, wanted of every limit that differs.
local key, client_run = run.PREFIX .. 'limits', ARGV[2]
-- Read here: between a read of the client's and this step the server might restart.
local server_run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
if run.meta.server_run ~= server_run then
  if run.meta.server_run then run.set('suspect', 1) end
  run.set('server_run', server_run)
  run.set('run_revision', run.number('revision'))
end
run.is_rewound()
-- Others may have gone on since: the revision alone would say that all is well.
if client_run ~= '' and client_run ~= server_run and tonumber(ARGV[1]) > run.number('run_revision') then run.lose() end

local reply = { 'OK', server_run }
if #ARGV > 2 and redis.call('EXISTS', key) == 0 then
  redis.call('HSET', key, unpack(ARGV, 3))
  local limits = {}
  for i = 3, #ARGV, 2 do limits[ARGV[i]] = tonumber(ARGV[i + 1]) end
  run.set('limits', cmsgpack.pack(limits))
end
for i = 3, #ARGV, 2 do
  local found = redis.call('HGET', key, ARGV[i]) or 'nothing'
  if found ~= ARGV[i + 1] then
    for _, text in ipairs({ ARGV[i], found, ARGV[i + 1] }) do table.insert(reply, text) end
  end
end
return run.finish(reply)
