"""Plans of requests: pure functions of what workers hold of a request, and of a snapshot of the workers.

No policy knows a connection, and each clock is given, so that the same objects run in the router and in
`simulator`. `Desk` (`desk`) is the whole of them: it is told what happens, keeps the tables and the prefill
window, and makes plans.

1. Prefill: `PrefillLoads` tracks what workers report and what this router sends. For each choice it makes a
   `PrefillSnapshot`: the seconds of work ahead at each worker, its speed, and the cached part of the prompt
   (`ChunkIndex`). A `PrefillPolicy` takes the snapshot and the request, and returns the row of a worker.
2. Decode: `DecodePool` has the `DecodeLoad` of each worker, and chooses one with `two_choices`.
   `Fleet.choose_decode` prefers one that has more of the prompt cached.
   How long an answer will be follows from earlier ones (`AnswerLengths`).
3. `plan` (`planner`) takes a request, what workers hold of it, and the tables (`Fleet`). It returns a `Plan`,
   or what the request lacks. The router submits it, and the simulator runs it.
4. Its costs: `placement.place` compares a handover with one worker that computes the prompt and decodes, by
   the model of steps that each worker reports (`steps.step_model`, `pace`). `split.split` splits a prompt
   between several workers. `Prefixes` names a worker that has more of the prompt cached.
5. `regime.apart` decides for the whole fleet what single plans do not find: prefill workers decode nothing.
"""
