"""The decode role of a worker: fetches the KV of a prompt while another worker computes it, then decodes.

The life of a request:

1. A router submits it. The engine reserves blocks for the prompt and the first token, or the worker answers
   *no room*. The prefix cache may have the first blocks already. Of a model with states the engine also
   reserves a slot for them. If steps move memory for the request, it waits for them.
2. The KV receiver fetches the rest of the KV, and the states, and injects them layer by layer as they arrive.
3. When all of it is complete and verified, the request joins the running batch, and the worker repeats
   prefill's first token.
4. The request gets one token per step until it finishes.

If the KV does not arrive, the reservation waits for a Retarget, a Cancel or the deadline of the request. A
request without a source is prefilled on this worker, in chunks that hardly delay the running batch. The
router may name a worker with more of its prompt in the prefix cache. Then the missing KV is fetched from
there first (`worker.engine_process.prefix_fetches`). If the source is a prefill of this worker, the request
takes that prefill over. A preempted request is handed back to its router.
"""
