-- What wrk sends, by the environment of its process, and one line of JSON at its end.
wrk.method = os.getenv("LOAD_METHOD")
local path = os.getenv("LOAD_BODY")
if path then
  local file = io.open(path, "rb")
  wrk.body = file:read("*a")
  file:close()
  wrk.headers["Content-Type"] = os.getenv("LOAD_TYPE")
end
local bearer = os.getenv("LOAD_BEARER")
if bearer then
  wrk.headers["Authorization"] = "Bearer " .. bearer
end

done = function(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "duration_us": %d, "failed": %d, "p50_us": %d, "p99_us": %d}\n',
    summary.requests, summary.duration,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50), latency:percentile(99)))
end
