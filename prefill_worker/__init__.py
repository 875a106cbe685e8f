"""The prefill worker: computes prompts and sends their KV to decode workers, layer by layer.

The life of a prefill:

1. A router submits it. It waits to be scheduled.
2. The engine reserves blocks for the whole prompt, and the KV sender opens it for a FETCH.
3. The engine computes the prompt in chunks. Each layer of a chunk is ready for the lanes when it is enqueued.
4. The first token goes to the router at once, and COMMIT goes to the decode worker.
5. The prefill is held until the decode worker's ACK, a cancel or the hold deadline, or until its blocks are
   needed.
6. Its blocks are released when no transfer reads them.

A prefill without handover is released without a COMMIT. So is a prefill if its first token ends the request.
"""

from worker.config import WorkerConfig


def main(config: WorkerConfig) -> int:
    """Runs the worker until SIGTERM (drains) or SIGINT.

    Returns the exit code, which is not 0 if the worker could not start or a process of it died.
    """
    from worker.service import run

    return run(config, "prefill_worker.engine_process")
