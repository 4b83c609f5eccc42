-- All counters of a deployment, changed by one script: each call is atomic, and every operation shares what stands on top.
--
-- KEYS[1]  a prefix with a hash tag, such as {tierline}: all keys begin with it, so they lie in one slot of a cluster
-- ARGV[1]  the operation, ARGV[2] its arguments in MessagePack; the answer is MessagePack too
--
--   PREFIX:scope:ID      record  what the scope has used, see `scopes_of`
--   PREFIX:hold:ID       record  an admitted request: state, scopes, unlimited, tokens, cost, month, cut, owner, restored
--   PREFIX:expiry        zset    hold ids by when they expire; expired ones by when they can be settled no more
--   PREFIX:spend:NUMBER  hash    of a month: run, cut, seeded, next_s, interval_s; of each scope base:ID, the ledger's sum
--                                of requests before the cut, and since:ID, what was settled of the others
--   PREFIX:early:NUMBER  set     requests with ids before the cut that are counted here all the same
--   PREFIX:processes     zset    gateway processes by when they were last heard of
--
-- Records are MessagePack: one read and one write each, where a hash would take twice the time. Amounts are doubles:
-- exact up to 2^53 nano-dollars, nine million dollars a month in one scope. Times are seconds since 1970 by Redis's
-- clock, the same for every gateway.

local PREFIX, OPERATION, arguments = KEYS[1], ARGV[1], cmsgpack.unpack(ARGV[2])
local EXPIRY = PREFIX .. ':expiry'
local DUST = 1e-6
local LATE_SETTLE_S = 86400
local SCOPE_TTL_S = 40 * 86400
local MONTH_TTL_S = 70 * 86400
-- More than this in one call would hold up everybody else; the next call goes on.
local MOST_EXPIRED = 200
local REFRESH_SOON_S, REFRESH_AT_MOST_S = 1, 3600

local function clock()
  if arguments.now then return arguments.now end -- a test's own clock
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

-- The calendar month as a number, year * 12 + month - 1 (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms").
local function month_of(seconds)
  local days = math.floor(seconds / 86400) + 719468
  local era = math.floor(days / 146097)
  local day = days - era * 146097
  local year = math.floor((day - math.floor(day / 1460) + math.floor(day / 36524) - math.floor(day / 146096)) / 365)
  local day_of_year = day - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local shifted = math.floor((5 * day_of_year + 2) / 153) -- March is 0
  local month = shifted < 10 and shifted + 2 or shifted - 10 -- January is 0
  if month < 2 then year = year + 1 end
  return (year + era * 400) * 12 + month
end

local now = clock()
local MONTH = month_of(now)
local MONTH_KEY = PREFIX .. ':spend:' .. MONTH

local function number(value) return tonumber(value or 0) end
local function exact(value) return string.format('%.17g', value) end
local function scope_key(id) return PREFIX .. ':scope:' .. id end
local function hold_key(id) return PREFIX .. ':hold:' .. id end
local function answer(...) return cmsgpack.pack({ ... }) end

-- What is spent in the running month comes from two places that never overlap. A request whose id is before the cut
-- counts in the ledger only: `base` is the ledger's sum of those, and is read again as their rows arrive. All others
-- count here only: `since`, also that of scopes which have no limit now and may be given one. When Redis has lost data (it is empty, or runs for the first time since a restart), a new
-- cut puts everything so far on the ledger's side.
--
-- scopes: {{id, requests a minute, tokens a minute, parallel, budget, label}, ...}, with -1 for no limit.
-- Returns the counters of each, and the month's cut ('' for none) and whether its sums are known.
local function scopes_of(scopes)
  local fields, keys = { 'run', 'cut', 'seeded' }, {}
  for i, scope in ipairs(scopes) do
    fields[2 * i + 2], fields[2 * i + 3] = 'base:' .. scope[1], 'since:' .. scope[1]
    keys[i] = scope_key(scope[1])
  end
  local month = redis.call('HMGET', MONTH_KEY, unpack(fields))
  local valid = month[2] and month[1] == arguments.run
  local cut, seeded = valid and month[2] or '', valid and month[3] == '1'
  local stored = #keys > 0 and redis.call('MGET', unpack(keys)) or {}
  local counters = {}
  for i, scope in ipairs(scopes) do
    local c = stored[i] and cmsgpack.unpack(stored[i])
      or { requests = 0, requests_at = now, tokens = 0, tokens_at = now, parallel = 0 }
    if c.month ~= MONTH then c.held, c.month = 0, MONTH end
    c.base = seeded and number(month[2 * i + 2]) or 0
    c.since = valid and number(month[2 * i + 3]) or 0
    c.limits = scope
    counters[i] = c
  end
  return counters, cut, seeded
end

local function save(c)
  local record = {
    requests = c.requests, requests_at = c.requests_at, tokens = c.tokens, tokens_at = c.tokens_at,
    parallel = c.parallel, month = c.month, held = c.held,
  }
  redis.call('SET', scope_key(c.limits[1]), cmsgpack.pack(record), 'EX', SCOPE_TTL_S)
end

local function spend(id, cost)
  redis.call('HINCRBY', MONTH_KEY, 'since:' .. id, string.format('%.0f', cost))
end

local function seen(c)
  return { c.requests, c.requests_at, c.tokens, c.tokens_at, c.base + c.since, c.held, c.parallel }
end

local function all_seen(counters)
  local states = {}
  for i, c in ipairs(counters) do states[i] = seen(c) end
  return states
end

local function drain(c, bucket, limit)
  c[bucket] = math.max(0, c[bucket] - math.max(0, now - c[bucket .. '_at']) * limit / 60)
  c[bucket .. '_at'] = now
end

local function hold_of(id)
  local stored = redis.call('GET', hold_key(id))
  return stored and cmsgpack.unpack(stored) or nil
end

local function keep(id, hold, until_s)
  redis.call('SET', hold_key(id), cmsgpack.pack(hold), 'EX', math.ceil(until_s - now) + LATE_SETTLE_S + 60)
  redis.call('ZADD', EXPIRY, exact(until_s), id)
end

-- Give back what nobody settled in time: each hold by its id, so what is given back is what was taken.
local function reclaim()
  local expired = 0
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', EXPIRY, '-inf', exact(now), 'LIMIT', 0, MOST_EXPIRED)) do
    local hold = hold_of(id)
    if hold and hold.state == 'open' then
      for _, c in ipairs((scopes_of(hold.scopes))) do
        c.parallel = math.max(0, c.parallel - 1)
        if hold.month == MONTH then c.held = math.max(0, c.held - hold.cost) end
        save(c)
      end
      hold.state = 'expired'
      keep(id, hold, now + LATE_SETTLE_S)
      expired = expired + 1
    else
      redis.call('DEL', hold_key(id))
      redis.call('ZREM', EXPIRY, id)
    end
  end
  return expired
end

-- Whether a request fits; counting.py says the same in Python, and words the refusal.
local function room(c, tokens, cost)
  local _, per_minute, tokens_per_minute, parallel, budget = unpack(c.limits)
  if parallel >= 0 and c.parallel >= parallel then return false end
  if per_minute >= 0 then
    drain(c, 'requests', per_minute)
    if c.requests + 1 - per_minute > DUST then return false end
  end
  if tokens_per_minute >= 0 then
    drain(c, 'tokens', tokens_per_minute)
    if c.tokens + math.min(tokens, tokens_per_minute) - tokens_per_minute > DUST then return false end
  end
  local settled = c.base + c.since
  return budget < 0 or (settled + c.held + cost <= budget and settled < budget)
end

local operations = {}

-- id, owner, scopes, unlimited, tokens, cost, ttl_s, restore
-- `unlimited`: ids of scopes that only count what is spent. `restore`: the request is running already, so it is counted whatever the limits say.
function operations.admit(a)
  local expired = reclaim()
  local earlier = hold_of(a.id)
  if earlier and earlier.state == 'open' then return answer('again', expired, all_seen((scopes_of(earlier.scopes)))) end
  if earlier and (earlier.state == 'expired' or a.restore) then return answer('gone', expired) end
  local counters, cut, seeded = scopes_of(a.scopes)
  if not a.restore then
    for _, scope in ipairs(a.scopes) do
      if scope[5] >= 0 and not seeded then return answer('seed', expired) end
    end
    for i, c in ipairs(counters) do
      if not room(c, a.tokens, a.cost) then return answer('refused', expired, i, now, all_seen(counters)) end
    end
  end
  for _, c in ipairs(counters) do
    if c.limits[2] >= 0 then c.requests = c.requests + 1 end
    if c.limits[3] >= 0 then c.tokens = c.tokens + a.tokens end
    c.parallel = c.parallel + 1
    c.held = c.held + a.cost
    save(c)
  end
  if cut ~= '' and a.id < cut then
    if a.restore then
      cut = '' -- it ran when the cut was made: the ledger's row counts
    else
      redis.call('SADD', PREFIX .. ':early:' .. MONTH, a.id)
      redis.call('EXPIRE', PREFIX .. ':early:' .. MONTH, MONTH_TTL_S)
    end
  end
  local hold = {
    state = 'open', scopes = a.scopes, unlimited = a.unlimited, tokens = a.tokens, cost = a.cost, month = MONTH, cut = cut, owner = a.owner,
    restored = a.restore or false,
  }
  keep(a.id, hold, now + a.ttl_s)
  return answer('granted', expired, all_seen(counters))
end

-- id, tokens, cost: what was used.
function operations.settle(a)
  local expired = reclaim()
  local hold = hold_of(a.id)
  if not hold or hold.state == 'settled' then return answer('nothing', expired) end
  local counters, cut, seeded = scopes_of(hold.scopes)
  local counts_here = cut ~= '' and hold.cut == cut and hold.month == MONTH and a.cost > 0
  for _, c in ipairs(counters) do
    if c.limits[3] >= 0 then
      drain(c, 'tokens', c.limits[3])
      c.tokens = math.max(0, c.tokens + a.tokens - hold.tokens)
    end
    if hold.state == 'open' then c.parallel = math.max(0, c.parallel - 1) end
    if hold.month == MONTH and hold.state == 'open' then c.held = math.max(0, c.held - hold.cost) end
    if counts_here then
      c.since = c.since + a.cost
      spend(c.limits[1], a.cost)
    end
    save(c)
  end
  if counts_here then
    for _, id in ipairs(hold.unlimited or {}) do spend(id, a.cost) end
  end
  redis.call('ZREM', EXPIRY, a.id)
  if hold.restored then -- it may be brought back once more by a process that never heard the answer
    redis.call('SET', hold_key(a.id), cmsgpack.pack({ state = 'settled' }), 'EX', LATE_SETTLE_S)
  else
    redis.call('DEL', hold_key(a.id))
  end
  if seeded and hold.month == MONTH and hold.cut ~= cut then
    -- The ledger's side of the cut: its row will be there in a moment.
    redis.call('HSET', MONTH_KEY, 'next_s', exact(now + REFRESH_SOON_S), 'interval_s', REFRESH_SOON_S)
  end
  return answer('settled', expired, now, hold.scopes, all_seen(counters))
end

-- id, ttl_s, tokens, cost: at least these, never less. Money only as far as the budgets go.
function operations.touch(a)
  local expired = reclaim()
  local hold = hold_of(a.id)
  if not hold or hold.state ~= 'open' then return answer('nothing', expired) end
  local more_tokens, more_cost = math.max(0, a.tokens - hold.tokens), math.max(0, a.cost - hold.cost)
  local counters = scopes_of(hold.scopes)
  for i, c in ipairs(counters) do
    local budget = c.limits[5]
    if hold.month == MONTH and budget >= 0 and more_cost > 0 and c.base + c.since + c.held + more_cost > budget then
      return answer('refused', expired, i, now, hold.scopes, all_seen(counters), more_cost)
    end
  end
  for _, c in ipairs(counters) do
    if c.limits[3] >= 0 then
      drain(c, 'tokens', c.limits[3])
      c.tokens = c.tokens + more_tokens
    end
    if hold.month == MONTH then c.held = c.held + more_cost end
    save(c)
  end
  hold.tokens, hold.cost = hold.tokens + more_tokens, hold.cost + more_cost
  keep(a.id, hold, math.max(number(redis.call('ZSCORE', EXPIRY, a.id)), now + a.ttl_s))
  return answer('touched', expired, hold.scopes, all_seen(counters))
end

-- scopes, budgets: their counters as they are; with `budgets`, only if the month's sums are known.
function operations.look(a)
  local expired = reclaim()
  local counters, _, seeded = scopes_of(a.scopes)
  if a.budgets and not seeded then return answer('seed', expired) end
  return answer('seen', expired, all_seen(counters), now)
end

-- cut, force: make a cut unless there is a valid one; the answer is the one in force, and its month.
function operations.cut(a)
  local _, cut = scopes_of({})
  if cut == '' or a.force then
    redis.call('DEL', MONTH_KEY, PREFIX .. ':early:' .. MONTH)
    redis.call('HSET', MONTH_KEY, 'run', a.run, 'cut', a.cut)
    redis.call('EXPIRE', MONTH_KEY, MONTH_TTL_S)
    cut = a.cut
  end
  return answer('cut', 0, MONTH, cut)
end

-- month: ids before its cut that are counted here all the same.
function operations.early(a)
  return answer('early', 0, redis.call('SMEMBERS', PREFIX .. ':early:' .. a.month))
end

-- month, cut, base = {scope id, nano-dollars, ...}: the ledger's sums of the requests before the cut. They only grow, so
-- of two processes that read the ledger at once the later reading stands.
function operations.base(a)
  local _, cut, seeded = scopes_of({})
  if a.month ~= MONTH or a.cut ~= cut then return answer('over', 0) end
  for i = 1, #a.base, 2 do
    local field = 'base:' .. a.base[i]
    if number(redis.call('HGET', MONTH_KEY, field)) < a.base[i + 1] then
      redis.call('HSET', MONTH_KEY, field, exact(a.base[i + 1]))
    end
  end
  if not seeded then
    redis.call('HSET', MONTH_KEY, 'seeded', '1', 'interval_s', REFRESH_SOON_S, 'next_s', exact(now + REFRESH_SOON_S))
  end
  return answer('based', 0)
end

-- process, alive_s: how many processes there are, whether this one was known, and whether it is this one's turn to read
-- the ledger again: soon after a cut, then ever more rarely.
function operations.beat(a)
  local expired = reclaim()
  local key = PREFIX .. ':processes'
  redis.call('ZREMRANGEBYSCORE', key, '-inf', exact(now - a.alive_s))
  local new = redis.call('ZADD', key, exact(now), a.process)
  redis.call('EXPIRE', key, math.ceil(a.alive_s) + 60)
  redis.call('EXPIRE', EXPIRY, SCOPE_TTL_S)
  local _, _, seeded = scopes_of({})
  local due = false
  if seeded then
    local plan = redis.call('HMGET', MONTH_KEY, 'next_s', 'interval_s')
    if now >= number(plan[1]) then
      local interval = number(plan[2])
      redis.call('HSET', MONTH_KEY, 'next_s', exact(now + interval),
        'interval_s', exact(math.min(REFRESH_AT_MOST_S, interval * 2)))
      due = true
    end
  end
  return answer('alive', expired, redis.call('ZCARD', key), new == 0, due)
end

-- process: it stops.
function operations.leave(a)
  redis.call('ZREM', PREFIX .. ':processes', a.process)
  return answer('left', 0)
end

-- owners, first, count: ids of their holds that are not settled, expired ones too, among `count` holds from `first` on;
-- and how many holds there were.
function operations.owned(a)
  local wanted, ids = {}, {}
  for _, owner in ipairs(a.owners) do wanted[owner] = true end
  local page = redis.call('ZRANGE', EXPIRY, a.first, a.first + a.count - 1)
  for _, id in ipairs(page) do
    local hold = hold_of(id)
    if hold and wanted[hold.owner] then ids[#ids + 1] = id end
  end
  return answer('owned', 0, ids, #page)
end

return operations[OPERATION](arguments)
