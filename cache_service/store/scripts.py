"""Lua scripts for atomic operations in Redis, each sent with its text, so that a restarted server needs no setup.

All keys of a script share one hash tag, as Redis Cluster requires. Stream ids are compared as strings, because Lua's numbers are
doubles.
"""

from __future__ import annotations

_COMPARE = """
local function parts(id) return string.match(id, '^(%d+)-(%d+)$') end
local function before(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end
local function older(a, b)
  local am, as = parts(a)
  local bm, bs = parts(b)
  if am ~= bm then return before(am, bm) end
  return before(as, bs)
end
"""
# KEYS: log, snap, epoch. Returns ids only; XINFO or XRANGE would also transfer the entries.
HEAD = """
local first, last = '0-0', '0-0'
if redis.call('EXISTS', KEYS[1]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[1])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
    if info[i] == 'first-entry' and info[i + 1] then first = info[i + 1][1] end
  end
end
return {first, last, redis.call('HGET', KEYS[2], 'id') or '0-0', redis.call('GET', KEYS[3]) or '0'}
"""
# KEYS: snap, its pieces, epoch. ARGV: stream id, name, pieces, bytes, epoch or ''. Returns 1 if it is the newest now.
POINT = (
    _COMPARE
    + """
local old = redis.call('HMGET', KEYS[1], 'id', 'name')
local late = old[1] and older(ARGV[1], old[1])
local dead = ARGV[5] ~= '' and (redis.call('GET', KEYS[3]) or '0') ~= ARGV[5]
if late or dead or redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('UNLINK', KEYS[2])
  return 0
end
if old[2] then redis.call('UNLINK', KEYS[1] .. ':' .. old[2]) end
redis.call('PERSIST', KEYS[2])
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'name', ARGV[2], 'pieces', ARGV[3], 'bytes', ARGV[4])
return 1
"""
)
# KEYS: log, snap, epoch. Memory is freed first: then a full Redis lets the script finish.
DELETE = """
local old = redis.call('HGET', KEYS[2], 'name')
if old then redis.call('UNLINK', KEYS[2] .. ':' .. old) end
redis.call('UNLINK', KEYS[2])
redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)
return redis.call('INCR', KEYS[3])
"""
# KEYS: epoch. ARGV: lower bound.
RAISE = """
local now = tonumber(redis.call('GET', KEYS[1]) or '0')
if now >= tonumber(ARGV[1]) then return now end
redis.call('SET', KEYS[1], ARGV[1])
return tonumber(ARGV[1])
"""
# KEYS: any of ours, so that a cluster asks the server that dates the entries. Microseconds since 1970; TIME needs a permission.
TIME = "return string.match(redis.call('INFO', 'server'), 'server_time_usec:(%d+)')"
# KEYS: lease. ARGV: holder, milliseconds.
ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
