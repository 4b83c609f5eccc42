-- The answers that cache processes share: each call is atomic; one stream tells every process what changed.
--
-- KEYS[1]  a prefix with a hash tag, such as {tierline}:cache
-- ARGV[1]  the operation
-- ARGV[2]  the data set that the caller has joined; another one answers {'lost'}
-- ARGV[3…] its arguments
--
--   PREFIX:answer:ID     hash    answer, first (the exact key of the question it was given to), epoch, created, expires,
--                                version (of the keys), and q:EXACT for each of its questions; expires by itself
--   PREFIX:exact:EXACT   string  the ID of the answer to that question; expires with it
--   PREFIX:ends          zset    IDs by the end of their time, in milliseconds;  PREFIX:order  by when they were put
--   PREFIX:sizes         hash    bytes by ID;  PREFIX:bytes  their sum
--   PREFIX:changes       stream  n (counted without a gap), by (the process), kind, id, and for a retraction its number
--   PREFIX:sequence      string  n of the latest change;  PREFIX:epoch  number of the latest retraction
--   PREFIX:retractions   zset    what was forgotten, by number: so that who was away learns of it
--   PREFIX:replicas      hash    name of a process -> epoch it has reached, when it said so, what people call it
--   PREFIX:lessons       stream  what promises learn, by number (N-0): by, meaning (verifier, embedder), kind, value
--   PREFIX:lesson        string  number of the latest one;  PREFIX:teachers  name of a process -> its latest, by its count
--   PREFIX:promise:NAME  hash    a promise as it stood after lesson `n`: dump; how many labels it has by now: labels
--   PREFIX:promises      set     the names of the promises
--   PREFIX:rated:ID      string  how many answers somebody's word on a request has evicted, for a minute
--   PREFIX:fitting:NAME  string  who finds its bar anew at present
--   PREFIX:dataset       string  made when Redis is empty: whoever knows another one has lost touch

local PREFIX, OPERATION, DATASET = KEYS[1], ARGV[1], ARGV[2]
local ENDS, ORDER, SIZES, BYTES = PREFIX .. ':ends', PREFIX .. ':order', PREFIX .. ':sizes', PREFIX .. ':bytes'
local CHANGES, SEQUENCE, EPOCH = PREFIX .. ':changes', PREFIX .. ':sequence', PREFIX .. ':epoch'
local RETRACTIONS, REPLICAS = PREFIX .. ':retractions', PREFIX .. ':replicas'
local MOST_CHANGES, MOST_RETRACTIONS, MOST_LESSONS = 50000, 10000, 20000
-- More than this in one call would hold up everybody else; the next call goes on.
local MOST_AT_ONCE = 100
local ENTRY_BYTES = 512
local GHOST_MS = 3600 * 1000
local DAY_MS = 24 * 3600 * 1000
local KEEP_PROMISES_MS = 30 * DAY_MS

local function argument(index) return ARGV[2 + index] end
local function answer_key(id) return PREFIX .. ':answer:' .. id end
local function exact_key(exact) return PREFIX .. ':exact:' .. exact end
local function number_at(key) return tonumber(redis.call('GET', key) or 0) end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function tell(...)
  redis.call('XADD', CHANGES, 'MAXLEN', '~', MOST_CHANGES, '*', 'n', redis.call('INCR', SEQUENCE), ...)
end

local function resize(id, bytes)
  local before = tonumber(redis.call('HGET', SIZES, id) or 0)
  if bytes == 0 then redis.call('HDEL', SIZES, id) else redis.call('HSET', SIZES, id, bytes) end
  redis.call('INCRBY', BYTES, bytes - before)
end

-- What an answer and its questions take now.
local function measure(id)
  local key = answer_key(id)
  local bytes = ENTRY_BYTES
  for _, field in ipairs(redis.call('HKEYS', key)) do bytes = bytes + redis.call('HSTRLEN', key, field) end
  resize(id, bytes)
end

local function remove(id)
  local key = answer_key(id)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if string.sub(field, 1, 2) == 'q:' then
      local pointer = exact_key(string.sub(field, 3))
      if redis.call('GET', pointer) == id then redis.call('DEL', pointer) end
    end
  end
  redis.call('UNLINK', key)
  redis.call('ZREM', ENDS, id)
  redis.call('ZREM', ORDER, id)
  resize(id, 0)
end

local function remove_question(id, exact)
  local key = answer_key(id)
  redis.call('DEL', exact_key(exact))
  if redis.call('HGET', key, 'first') == exact then return remove(id) end
  if redis.call('HDEL', key, 'q:' .. exact) == 1 then measure(id) end
end

-- What was known of this very request is of no more use: the answer, or the alias alone.
local function make_way(exact, id)
  local known = redis.call('GET', exact_key(exact))
  if known and known ~= id then remove_question(known, exact) end
end

-- Forget what is past its time, then what was put first until the rest is within bounds. No retraction: other processes
-- may keep what they have of it.
local function make_room(most_bytes)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', ENDS, '-inf', now_ms(), 'LIMIT', 0, MOST_AT_ONCE)) do remove(id) end
  for _ = 1, MOST_AT_ONCE do
    if number_at(BYTES) <= most_bytes then return end
    local first = redis.call('ZRANGE', ORDER, 0, 0)[1]
    if not first then return end
    remove(first)
  end
end

local function log_retraction(number, packed, by)
  redis.call('ZADD', RETRACTIONS, number, packed)
  redis.call('ZREMRANGEBYRANK', RETRACTIONS, 0, -MOST_RETRACTIONS - 1)
  tell('by', by, 'kind', 'retract', 'number', number, 'retraction', packed)
end

local operations = {}

-- Arguments: an id for a new data set, the highest number of a retraction that the caller knows.
-- {data set, n of the latest change, its place in the stream, epoch, number of the oldest retraction kept or 0}
function operations.join()
  local dataset = redis.call('GET', PREFIX .. ':dataset')
  if not dataset then
    dataset = argument(1)
    redis.call('SET', PREFIX .. ':dataset', dataset)
  end
  if tonumber(argument(2)) > number_at(EPOCH) then redis.call('SET', EPOCH, argument(2)) end
  local latest = redis.call('XREVRANGE', CHANGES, '+', '-', 'COUNT', 1)[1]
  local oldest = redis.call('ZRANGE', RETRACTIONS, 0, 0, 'WITHSCORES')
  return { dataset, number_at(SEQUENCE), latest and latest[1] or '0-0', number_at(EPOCH), tonumber(oldest[2] or 0) }
end

-- by, id, exact, expires in ms, created, epoch, version, most bytes, answer, question
function operations.put()
  local by, id, exact, expires, created, epoch, version, most_bytes, answer, question = unpack(ARGV, 3, 12)
  if (ENTRY_BYTES + #answer + #question) * 8 > tonumber(most_bytes) then return { 'too_large' } end
  if tonumber(expires) <= now_ms() then return { 'expired' } end
  make_way(exact, id)
  redis.call('HSET', answer_key(id), 'answer', answer, 'first', exact, 'epoch', epoch, 'created', created, 'expires',
    expires, 'version', version, 'q:' .. exact, question)
  redis.call('PEXPIREAT', answer_key(id), expires)
  redis.call('SET', exact_key(exact), id, 'PXAT', expires)
  redis.call('ZADD', ENDS, expires, id)
  redis.call('ZADD', ORDER, number_at(SEQUENCE), id)
  measure(id)
  make_room(tonumber(most_bytes))
  tell('by', by, 'kind', 'put', 'id', id)
  return { 'ok' }
end

-- by, id, exact, most bytes, question
function operations.alias()
  local by, id, exact, most_bytes, question = unpack(ARGV, 3, 7)
  local expires = redis.call('HGET', answer_key(id), 'expires')
  if not expires then return { 'gone' } end
  make_way(exact, id)
  if redis.call('EXISTS', answer_key(id)) == 0 then return { 'gone' } end
  redis.call('HSET', answer_key(id), 'q:' .. exact, question)
  redis.call('SET', exact_key(exact), id, 'PXAT', expires)
  measure(id)
  make_room(tonumber(most_bytes))
  tell('by', by, 'kind', 'put', 'id', id)
  return { 'ok' }
end

-- by, the retraction as it travels, what it is of (answer, question, purge), id, exact. {'ok', its number}
function operations.retract()
  local by, packed, kind, id, exact = unpack(ARGV, 3, 7)
  if kind == 'answer' then remove(id) elseif kind == 'question' then remove_question(id, exact) end
  local number = redis.call('INCR', EPOCH)
  log_retraction(number, packed, by)
  return { 'ok', number }
end

-- A retraction that was made in another data set: by, number, packed. Knowing it already changes nothing.
function operations.recall()
  local by, number, packed = unpack(ARGV, 3, 5)
  if redis.call('ZSCORE', RETRACTIONS, packed) then return { 'ok' } end
  if tonumber(number) > number_at(EPOCH) then redis.call('SET', EPOCH, number) end
  log_retraction(number, packed, by)
  return { 'ok' }
end

-- Answers that a purge has met, by id.
function operations.drop()
  for index = 3, #ARGV do remove(ARGV[index]) end
  return { 'ok' }
end

-- A process is alive: name, epoch that it has reached, what people call it. {'ok', n of the latest change, answers, bytes}
function operations.beat()
  redis.call('HSET', REPLICAS, argument(1), argument(2) .. ' ' .. string.format('%.0f', now_ms()) .. ' ' .. argument(3))
  return { 'ok', number_at(SEQUENCE), redis.call('ZCARD', ENDS), number_at(BYTES) }
end

function operations.leave()
  redis.call('HDEL', REPLICAS, argument(1))
  return { 'ok' }
end

-- {'ok', name, epoch, milliseconds since it was heard of, what people call it, …}
function operations.replicas()
  local found, now = { 'ok' }, now_ms()
  local all = redis.call('HGETALL', REPLICAS)
  for index = 1, #all, 2 do
    local epoch, seen, label = string.match(all[index + 1], '^(%d+) (%d+) (.*)$')
    if now - tonumber(seen) > GHOST_MS then
      redis.call('HDEL', REPLICAS, all[index])
    else
      for _, value in ipairs({ all[index], epoch, string.format('%.0f', now - tonumber(seen)), label }) do
        found[#found + 1] = value
      end
    end
  end
  return found
end

local LESSONS, LESSON, TEACHERS, PROMISES = PREFIX .. ':lessons', PREFIX .. ':lesson', PREFIX .. ':teachers', PREFIX .. ':promises'

local function promise_key(name) return PREFIX .. ':promise:' .. name end

local function teach(by, meaning, kind, value)
  local n = redis.call('INCR', LESSON)
  redis.call('XADD', LESSONS, 'MAXLEN', '~', MOST_LESSONS, n .. '-0', 'by', by, 'meaning', meaning, 'kind', kind,
    'value', value)
  return n
end

local function keep_promise(name, n, dump)
  redis.call('HSET', promise_key(name), 'n', n, 'dump', dump)
  redis.call('PEXPIRE', promise_key(name), KEEP_PROMISES_MS)
  redis.call('SADD', PROMISES, name)
end

-- by, that process's count of what it teaches, meaning, name, how many labels it is, value. Once each.
function operations.teach()
  local by, count, meaning, name, labels, value = unpack(ARGV, 3, 8)
  if tonumber(redis.call('HGET', TEACHERS, by) or 0) >= tonumber(count) then return { 'known' } end
  redis.call('HSET', TEACHERS, by, count)
  redis.call('PEXPIRE', TEACHERS, DAY_MS)
  redis.call('HINCRBY', promise_key(name), 'labels', labels)
  return { 'ok', teach(by, meaning, 'event', value) }
end

-- Everybody goes on from this promise, unless there is one with as many labels: by, meaning, name, its labels, dump, and
-- '1' where that one cannot be read.
function operations.found()
  local by, meaning, name, labels, dump, replace = unpack(ARGV, 3, 8)
  local known = redis.call('HEXISTS', promise_key(name), 'n') == 1 and redis.call('HGET', promise_key(name), 'labels')
  if known and replace ~= '1' and tonumber(known) >= tonumber(labels) then return { 'known' } end
  keep_promise(name, teach(by, meaning, 'found', name), dump)
  redis.call('HSET', promise_key(name), 'labels', labels)
  return { 'ok' }
end

-- A promise as everybody has it after a lesson: name, number of the lesson, dump.
function operations.keep()
  local name, n, dump = unpack(ARGV, 3, 5)
  if tonumber(redis.call('HGET', promise_key(name), 'n') or 0) < tonumber(n) then keep_promise(name, n, dump) end
  return { 'ok' }
end

-- A user's word on an answer that another process gave: by, meaning, value.
function operations.rate()
  return { 'ok', teach(argument(1), argument(2), 'rating', argument(3)) }
end

-- The process that gave it has heard: id of the rating, how many answers that evicted.
function operations.rated()
  redis.call('SET', PREFIX .. ':rated:' .. argument(1), argument(2), 'PX', 60000)
  return { 'ok' }
end

-- {'ok', how many} once it has, else {'waiting'}.
function operations.rating()
  local evicted = redis.call('GET', PREFIX .. ':rated:' .. argument(1))
  if not evicted then return { 'waiting' } end
  return { 'ok', tonumber(evicted) }
end

-- Whether the caller is to find a bar anew: name, who, for how many milliseconds nobody else is.
function operations.fit()
  local mine = redis.call('SET', PREFIX .. ':fitting:' .. argument(1), argument(2), 'NX', 'PX', argument(3))
  return { mine and 'yes' or 'no' }
end

-- {'ok', number of the latest lesson, number of the first one kept, name, …}
function operations.promises()
  local first = redis.call('XRANGE', LESSONS, '-', '+', 'COUNT', 1)[1]
  local latest = number_at(LESSON)
  local found = { 'ok', latest, first and tonumber(string.match(first[1], '^%d+')) or latest + 1 }
  for _, name in ipairs(redis.call('SMEMBERS', PROMISES)) do
    if redis.call('EXISTS', promise_key(name)) == 1 then
      found[#found + 1] = name
    else
      redis.call('SREM', PROMISES, name)
    end
  end
  return found
end

-- {'ok', n, labels, dump}, or {'gone'}
function operations.promise()
  local found = redis.call('HMGET', promise_key(argument(1)), 'n', 'labels', 'dump')
  if not found[1] then return { 'gone' } end
  return { 'ok', tonumber(found[1]), tonumber(found[2]), found[3] }
end

if OPERATION ~= 'join' and redis.call('GET', PREFIX .. ':dataset') ~= DATASET then return { 'lost' } end
return operations[OPERATION]()
