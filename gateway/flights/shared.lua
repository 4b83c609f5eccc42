-- Who goes to a backend for a question, among gateway processes, and their messages to each other.
--
-- KEYS[1]  a prefix with a hash tag, such as {tierline}
-- ARGV[1]  the operation
-- ARGV[2]  the length of its arguments (four bytes, big endian), the arguments in MessagePack, then a message
--
--   PREFIX:flight:ID         string   "process token" of the one that flies; expires unless renewed
--   PREFIX:process:PROCESS   channel  that a process listens to

local PREFIX, OPERATION = KEYS[1], ARGV[1]
local length = struct.unpack('>I4', ARGV[2])
local arguments = cmsgpack.unpack(string.sub(ARGV[2], 5, 4 + length))

local function flight_key(id) return PREFIX .. ':flight:' .. id end

local operations = {}

function operations.ping() return '' end

-- Nothing where the lease is the caller's now, else who has it.
function operations.take()
  local key = flight_key(arguments.id)
  local held = redis.call('GET', key)
  if held then return held end
  redis.call('SET', key, arguments.value, 'PX', arguments.lease_ms)
  return ''
end

-- Who has the lease, or nothing.
function operations.look() return redis.call('GET', flight_key(arguments.id)) or '' end

-- Leases of one process: id, value, id, value … Those that are another's by now stay as they are.
function operations.renew()
  for index = 1, #arguments.leases, 2 do
    local key = flight_key(arguments.leases[index])
    if redis.call('GET', key) == arguments.leases[index + 1] then redis.call('PEXPIRE', key, arguments.lease_ms) end
  end
  return ''
end

-- The flight has landed: for so long, who asks is still sent to the one that flew; 0: from now on anybody may fly.
function operations.land()
  local key = flight_key(arguments.id)
  if redis.call('GET', key) ~= arguments.value then return '' end
  if arguments.linger_ms == 0 then redis.call('DEL', key) else redis.call('PEXPIRE', key, arguments.linger_ms) end
  return ''
end

-- How many processes got the message, as text.
function operations.tell(message)
  return tostring(redis.call('PUBLISH', PREFIX .. ':process:' .. arguments.process, message))
end

return operations[OPERATION](string.sub(ARGV[2], 5 + length))
