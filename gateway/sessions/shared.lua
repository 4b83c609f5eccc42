-- Where conversations are, for all gateway processes: each call is atomic, the bounds are kept here.
--
-- KEYS[1]  a prefix with a hash tag, such as {tierline}
-- ARGV[1]  the operation: find, keep, ping
-- ARGV[2]  its arguments in MessagePack
--
--   PREFIX:session:ID   string  a pin as its process wrote it
--   PREFIX:sessions     zset    ids by the end of their time, seconds since 1970 by Redis's clock

local PREFIX, OPERATION = KEYS[1], ARGV[1]
local arguments = cmsgpack.unpack(ARGV[2])
local INDEX = PREFIX .. ':sessions'
-- More than this in one call would hold up everybody else; the next call goes on.
local MOST_FORGOTTEN = 20

local function pin_key(id) return PREFIX .. ':session:' .. id end

local function forget(ids)
  for _, id in ipairs(ids) do
    redis.call('DEL', pin_key(id))
    redis.call('ZREM', INDEX, id)
  end
end

local operations = {}

function operations.ping() return '' end

function operations.find() return redis.call('GET', pin_key(arguments.id)) or '' end

function operations.keep()
  local time = redis.call('TIME')
  local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
  redis.call('SET', pin_key(arguments.id), arguments.pin, 'PX', math.ceil(arguments.seconds * 1000))
  redis.call('ZADD', INDEX, string.format('%.3f', now + arguments.seconds), arguments.id)
  forget(redis.call('ZRANGEBYSCORE', INDEX, '-inf', string.format('%.3f', now), 'LIMIT', 0, MOST_FORGOTTEN))
  local excess = redis.call('ZCARD', INDEX) - arguments.most
  if excess > 0 then forget(redis.call('ZRANGE', INDEX, 0, math.min(excess, MOST_FORGOTTEN) - 1)) end
  return ''
end

return operations[OPERATION]()
