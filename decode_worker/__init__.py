"""The decode worker: fetches the KV of a prompt while a prefill worker computes it, then decodes.

The life of a request:

1. A router submits it. The engine reserves blocks for the prompt and the first token, or the worker answers
   *no room*.
2. The KV receiver fetches the KV and injects it layer by layer as it arrives.
3. When the KV is complete and verified, the request joins the running batch, and the worker repeats prefill's
   first token.
4. The request gets one token per step until it finishes.

If the KV does not arrive, the reservation waits for a Retarget, a Cancel or the deadline of the request. A
request without a source is prefilled on this worker, in chunks that hardly delay the running batch. A
preempted request is handed back to its router.
"""

from worker.config import WorkerConfig


def main(config: WorkerConfig) -> int:
    """Runs the worker until SIGTERM (drains) or SIGINT.

    Returns the exit code, which is not 0 if the worker could not start or a process of it died.
    """
    from worker.service import run

    return run(config, "decode_worker.engine_process")
