"""The prefill role of a worker: computes prompts and sends their KV to decode workers, layer by layer.

The life of a prefill:

1. A router submits it, and may name a worker with more of the prompt in its prefix cache. Then the missing KV
   is fetched from there first (`worker.engine_process.prefix_fetches`). The prefill waits to be scheduled.
2. The engine reserves blocks for the whole prompt, and the KV sender opens it for a FETCH. The router learns
   that the prefill has started, if it waits for that.
3. The engine computes the prompt in chunks. Each layer of a chunk is ready for the lanes when it is enqueued.
   The states of a layer are ready with the last chunk.
4. The first token goes to the router at once, and COMMIT goes to the decode worker.
5. The prefill is held until the decode worker's ACK, a cancel or the hold deadline, or until its blocks are
   needed.
6. Its blocks are released when its last lease ends: no transfer reads them.

A prompt may be shared: several workers compute ranges of it at the same time. Each then has a prefill of the
prompt up to its last range, which is its part (`prefill_worker.parts`).

A decode on the same worker can take a held prefill: the engine resumes it, and no KV moves. A prefill without
handover is released without a COMMIT. So is a prefill if its first token ends the request.

`serving` serves the prefix cache to other workers: it pins the chunks that a worker asks for, until they are
sent or the deadline has passed.
"""
