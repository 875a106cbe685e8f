"""The engine process of a worker. Its service runs `python -m baton.cluster.engine_process`.

It puts the engine and the two roles together. The package `worker` knows no role, and the roles do not know
each other.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.worker.engine_process.start import EngineProcessConfig, start

if TYPE_CHECKING:
    from baton.engine import Engine
    from baton.worker.engine_process.context import Context
    from baton.worker.engine_process.roles import Role


def run(config: EngineProcessConfig) -> int:
    # These imports load torch, which is slow. The process must be tied to its parent before.
    from baton.decode_worker.role import DecodeRole
    from baton.prefill_worker.role import PrefillRole, SenderSink
    from baton.worker.engine_process import process
    from baton.worker.engine_process.prefix_fetches import PrefixFetches, Workers
    from baton.worker.engine_process.shared_store import StoreSource

    def build(context: "Context") -> "tuple[Engine, Sequence[Role]]":
        sink = SenderSink(context.trace)
        engine = context.start_engine(sink.prefill_started, sink.layer_done)
        attempts, shared = context.attempts, context.resources(engine, lambda: sink.layers_ready)
        fetches = PrefixFetches(engine, shared.counts, shared.trace)
        fetches.sources.append(Workers(engine, shared.receiver, shared.incarnation, context.links))
        if (fds := context.config.store) is not None:
            context.store = StoreSource.open(engine, fds, context.transport.ranks, context.cached_chunks)
            fetches.sources.append(context.store)
        prefill = PrefillRole(attempts, shared, sink, fetches)
        return engine, (prefill, DecodeRole(attempts, shared, fetches))

    return process.run(config, build)


if __name__ == "__main__":
    start(EngineProcessConfig, run)
