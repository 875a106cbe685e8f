"""`baton bench`: load tests of any OpenAI-compatible endpoint.

Life of a run:

1. `target.endpoint` learns with small streamed requests what the server is and accepts. `target.tokenization`
   finds words of one token each, so that prompt lengths are exact.
2. `traffic.fleet` starts client processes. Each `traffic.client` sends what `workload` says when `arrivals`
   says, and reads the streams through `target.answer`. One `Record` comes back for each request.
3. `measurement` excludes the warm-up, checks whether the client kept up (`self_check`), and reduces the
   records to the rows and the detail of a `bench.report.Report`: percentiles with confidence intervals
   (`summary`).
4. `report` shows progress, and what the JSON of a report says as a table or a comparison.

`options` has the flags, `experiment` makes a run of them, `commands` is what `baton bench COMMAND` does.

Three rules hold everywhere:

- Latency counts from the *intended* send time. Otherwise a server that stalls would slow the client down and
  hide the stall (coordinated omission, a term of Gil Tene's).
- A failed request is a miss, never a fast answer.
- A run in which the client was the bottleneck says so, and is invalid.
"""
