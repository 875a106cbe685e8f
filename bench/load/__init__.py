"""`baton bench`: load tests of any OpenAI-compatible endpoint whose numbers can be trusted.

Life of a run: `endpoint` learns by streamed probes what the server is and accepts → `tokenization` finds
words of one token each, so that lengths are exact → `fleet` starts client processes → every `client` sends
what `workload` says when `arrivals` says, and reads the streams through `answer` → one `Record` per request
comes back → `steady_state` excludes the warm-up, `self_check` asks whether the client kept up, `measure`
reduces the records to percentiles with confidence intervals → `results` writes rows (JSON in the shape of
`bench.contract`), JSONL and the HTML page.

Three rules hold everywhere. Latency counts from the *intended* send time, so that a server that stalls cannot
hide it by slowing the client down (coordinated omission, a term of Gil Tene's). A request that failed is a
miss and never a fast answer. A run in which the client itself was the bottleneck says so and is invalid.
"""
