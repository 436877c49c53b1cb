-- Posts the bodies in the file $BODIES, one JSON document a line, in turn; ends with one JSON line on stderr.

local requests, number = {}, 0

function init(args)
  for body in io.lines(os.getenv("BODIES")) do
    requests[#requests + 1] = wrk.format("POST", nil, { ["content-type"] = "application/json" }, body)
  end
end

function request()
  number = number % #requests + 1
  return requests[number]
end

function done(summary, latency, all)
  local errors = summary.errors
  local lost = errors.connect + errors.read + errors.write + errors.timeout
  io.stderr:write(string.format(
    '{"ok": %d, "failed": %d, "requests": %d, "seconds": %.6f}\n',
    summary.requests - errors.status, lost + errors.status, summary.requests, summary.duration / 1e6))
end
