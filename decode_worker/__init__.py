"""The decode worker: takes the KV of a prompt from a prefill worker while it is being computed, then decodes.

The life of a request here: submitted by a router → blocks for prompt and first token reserved (or *no
room*) → KV fetched, injected layer by layer as it arrives → complete and verified → joins the running
batch, repeating prefill's first token → a token a step until it finishes. KV that does not come leaves the
reservation to a Retarget or a Cancel; a request without a source is prefilled here, in chunks
that hardly delay those that decode; a request that must make room for others is handed back to its
router.
"""

from worker.config import WorkerConfig


def main(config: WorkerConfig) -> int:
    """Runs the worker until SIGTERM (drains) or SIGINT; returns its exit code, non-zero if one of its
    processes died."""
    from worker.service import run

    return run(config, "decode_worker.engine_process")
