"""Routing policies: pure functions that choose a worker from a snapshot of the loads.

A policy has no state and knows neither connections nor clocks, so that the same objects run in the router and
in `simulator`.

1. Prefill: `PrefillLoads` tracks what workers report and what this router sends. For each choice it makes a
   `PrefillSnapshot`: the seconds of work ahead at each worker, its speed, and the cached part of the prompt
   (`ChunkIndex`). A `PrefillPolicy` takes the snapshot and the request, and returns the row of a worker.
2. Decode: `DecodePool` has the `DecodeLoad` of each worker, and chooses one with `two_choices`.
3. Placement: `place` decides whether the prefill worker hands the request over to the decode worker, or
   whether one of them computes it alone. It compares the estimate of `PrefillSnapshot.seconds` with the pace
   of the decode worker (`MixedPace`) and its cache (`DecodeCaches`).
"""
