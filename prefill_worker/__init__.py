"""The prefill worker: computes prompts and streams their KV, layer by layer, to the decode workers that ask
for it.

The life of a prefill here: submitted by a router → waiting → blocks for the whole prompt reserved, KV
offered → computed in chunks, each layer of each chunk ready for the lanes as soon as it is enqueued → first
token to the router at once and COMMIT down a lane → held until the decode worker's ACK (or cancel, drop,
deadline) → released. A prefill without handover, or one that its first token ends, is released without a
COMMIT.
"""

from worker.config import WorkerConfig


def main(config: WorkerConfig) -> int:
    """Runs the worker until SIGTERM (drains) or SIGINT; returns its exit code, non-zero if one of its
    processes died."""
    from worker.service import run

    return run(config, "prefill_worker.engine_process")
