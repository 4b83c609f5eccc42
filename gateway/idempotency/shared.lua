-- The answers that gateway processes share by idempotency key: each call is atomic, all bounds are kept here.
--
-- KEYS[1]  a prefix with a hash tag, such as {tierline}
-- ARGV[1]  the operation
-- ARGV[2]  the length of its arguments (four bytes, big endian), the arguments in MessagePack, then bytes of an answer;
--          what is returned has the same form
--
--   PREFIX:answer:ID        hash    fingerprint, state, token (of the request that runs), lease (its end), head, watched
--   PREFIX:answer:ID:body   string  the body so far
--   PREFIX:answers          zset    ids by the end of their time
--   PREFIX:answers:sizes    hash    bytes by id
--   PREFIX:answers:bytes    string  the sum of those
--
-- States are those of `recording.py`. Times are seconds since 1970 by Redis's clock.

local PREFIX, OPERATION = KEYS[1], ARGV[1]
local length = struct.unpack('>I4', ARGV[2])
local arguments = cmsgpack.unpack(string.sub(ARGV[2], 5, 4 + length))
local INDEX, SIZES, BYTES = PREFIX .. ':answers', PREFIX .. ':answers:sizes', PREFIX .. ':answers:bytes'
local ENTRY_BYTES = 2048
-- Who follows an answer that failed gets this long to read it; to a new request it is none.
local FAILED_S = 30
-- More than this in one call would hold up everybody else; the next call goes on.
local MOST_FORGOTTEN = 100

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local function exact(value) return string.format('%.17g', value) end
local function answer_key(id) return PREFIX .. ':answer:' .. id end
local function body_key(id) return answer_key(id) .. ':body' end

local function answer(data, ...)
  local said = cmsgpack.pack({ ... })
  return struct.pack('>I4', #said) .. said .. data
end

local function size(id, bytes)
  local before = tonumber(redis.call('HGET', SIZES, id) or 0)
  if bytes == 0 then redis.call('HDEL', SIZES, id) else redis.call('HSET', SIZES, id, bytes) end
  redis.call('INCRBY', BYTES, bytes - before)
end

local function forget(id)
  redis.call('DEL', answer_key(id), body_key(id))
  redis.call('ZREM', INDEX, id)
  size(id, 0)
end

-- The end of an answer's time. Redis's own expiry comes later: it would leave the sums behind.
local function lives_for(id, seconds)
  redis.call('ZADD', INDEX, exact(now + seconds), id)
  local expiry = math.ceil(seconds) + 3600
  redis.call('EXPIRE', answer_key(id), expiry)
  redis.call('EXPIRE', body_key(id), expiry)
end

-- Forget what is over, then the oldest until the rest is within bounds; returns how many went before their time.
local function make_room(own)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', INDEX, '-inf', exact(now), 'LIMIT', 0, MOST_FORGOTTEN)) do
    if id ~= own then forget(id) end
  end
  local evicted = 0
  while evicted < MOST_FORGOTTEN do
    local count, bytes = redis.call('ZCARD', INDEX), tonumber(redis.call('GET', BYTES) or 0)
    if count <= arguments.max_entries and bytes <= arguments.max_bytes then break end
    local oldest = redis.call('ZRANGE', INDEX, 0, 1)
    local id = oldest[1] ~= own and oldest[1] or oldest[2]
    if not id then break end
    forget(id)
    evicted = evicted + 1
  end
  return evicted
end

local function state_of(stored_state, lease)
  if (stored_state == 'running' or stored_state == 'lost') and tonumber(lease) < now then return 'gone' end
  return stored_state
end

local operations = {}

function operations.ping() return answer('') end

-- Who runs: {'lead', evicted}, or {the answer's state, token, fingerprint} of the request that does or did.
function operations.begin()
  local id = arguments.id
  local stored = redis.call('HMGET', answer_key(id), 'fingerprint', 'state', 'lease', 'token')
  local ends = tonumber(redis.call('ZSCORE', INDEX, id) or 0)
  local state = stored[1] and ends > now and state_of(stored[2], stored[3])
  if state and state ~= 'gone' and state ~= 'failed' then return answer('', state, stored[4], stored[1]) end
  forget(id)
  redis.call('HSET', answer_key(id), 'fingerprint', arguments.fingerprint, 'state', 'running', 'token', arguments.token,
    'lease', exact(now + arguments.lease_s))
  size(id, ENTRY_BYTES)
  lives_for(id, arguments.ttl_s)
  return answer('', 'lead', make_room(id))
end

-- The request that runs says how far it is, and that it is alive. Saying the same twice changes nothing.
-- {'ok', seconds since somebody read it or -1, evicted}; {'stolen'} where another request runs now, or none.
function operations.put(data)
  local id, state = arguments.id, arguments.state
  local key = answer_key(id)
  local stored = redis.call('HMGET', key, 'token', 'watched')
  if stored[1] ~= arguments.token then return answer('', 'stolen') end
  if state == 'refused' or state == 'gone' then
    forget(id)
    return answer('', 'ok', -1, 0)
  end
  redis.call('HSET', key, 'state', state, 'lease', exact(now + arguments.lease_s))
  if arguments.head then redis.call('HSET', key, 'head', arguments.head) end
  if state == 'lost' or state == 'too_large' then
    redis.call('DEL', body_key(id))
    size(id, ENTRY_BYTES)
  elseif #data > 0 then
    size(id, ENTRY_BYTES + redis.call('SETRANGE', body_key(id), arguments.from, data))
  end
  lives_for(id, state == 'failed' and FAILED_S or arguments.ttl_s)
  return answer('', 'ok', stored[2] and now - tonumber(stored[2]) or -1, make_room(id))
end

-- What an answer holds from a position on: {state, head, size}; 'none' where it is not there, or not that one.
function operations.read()
  local id = arguments.id
  local key = answer_key(id)
  local stored = redis.call('HMGET', key, 'token', 'state', 'lease', 'head')
  if stored[1] ~= arguments.token then return answer('', 'none', false, 0) end
  local state = state_of(stored[2], stored[3])
  if state == 'running' then redis.call('HSET', key, 'watched', exact(now)) end
  local data = redis.call('GETRANGE', body_key(id), arguments.from, arguments.from + arguments.count - 1)
  return answer(data, state, stored[4], redis.call('STRLEN', body_key(id)))
end

return operations[OPERATION](string.sub(ARGV[2], 5 + length))
