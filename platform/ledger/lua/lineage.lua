-- Versions and lag. Loaded after prelude.lua.

run.nodes, run.views = {}, {}

function run.node(version)
  if run.nodes[version] == nil then
    local text = redis.call('HGET', run.VERSIONS, version)
    if not text then return nil end
    local parent, batches, fence, content_hash = string.match(text, '^(%-?%d+) (%d+) (%d+) (.*)$')
    run.nodes[version] = {
      parent = tonumber(parent), batches = tonumber(batches), fence = tonumber(fence), content_hash = content_hash,
    }
  end
  return run.nodes[version]
end

function run.add_version(version, parent, batches, fence, content_hash)
  run.nodes[version] = { parent = parent, batches = batches, fence = fence, content_hash = content_hash }
  redis.call('HSET', run.VERSIONS, version, string.format('%d %d %d %s', parent, batches, fence, content_hash))
end

function run.never_committed(version)
  return { 'ERROR', 'version ' .. version .. ' was never committed' }
end

-- P14, as policy.path_lag: the limit + 1 stands for everything above it.
local function path_lag(parent, ahead, version, most)
  if not run.node(parent) or not run.node(version) then return most + 1 end
  local upper, lower = parent, version
  local total = run.node(parent).batches + ahead + run.node(version).batches
  while true do
    local lag = total - run.node(upper).batches - run.node(lower).batches
    if lag > most then return most + 1 end
    if upper == lower then return lag end
    if upper > lower then upper = run.node(upper).parent else lower = run.node(lower).parent end
    if not run.node(upper) or not run.node(lower) then return most + 1 end
  end
end

-- Lags as seen from weights `ahead` batches past `parent`; every path is walked once.
function run.view(parent, ahead)
  local key = parent .. ' ' .. ahead
  run.views[key] = run.views[key] or { parent = parent, ahead = ahead, lags = {} }
  return run.views[key]
end

function run.lag(view, version)
  local lag = view.lags[version]
  if not lag then
    lag = path_lag(view.parent, view.ahead, version, run.limit('max_lag'))
    view.lags[version] = lag
  end
  return lag
end

function run.is_over(view, version) return run.lag(view, version) > run.limit('max_lag') end

function run.is_ancestor(ancestor, version)
  while version > ancestor and run.node(version) do version = run.node(version).parent end
  return version == ancestor and run.node(version) ~= nil
end

function run.move_head(version)
  run.set('head', version)
  redis.call('XADD', run.PREFIX .. 'heads', 'MAXLEN', 16, '*', 'head', version)
end
