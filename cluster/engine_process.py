"""The engine process of a worker. Its service runs `python -m baton.cluster.engine_process`.

It puts the engine and the two roles together. The package `worker` knows no role, and the roles do not know
each other.
"""

from typing import TYPE_CHECKING

from baton.worker.engine_process.start import EngineProcessConfig, start

if TYPE_CHECKING:
    from baton.worker.engine_process.context import Context


def run(config: EngineProcessConfig) -> int:
    # These imports load torch, which is slow. The process must be tied to its parent before.
    from baton.decode_worker.role import DecodeRole
    from baton.prefill_worker.role import PrefillRole, SenderSink
    from baton.worker.engine_process import process
    from baton.worker.engine_process.prefix_fetches import PrefixFetches, Workers
    from baton.worker.engine_process.roles import Roles
    from baton.worker.engine_process.shared_store import StoreSource

    def build(context: "Context") -> Roles:
        sink = SenderSink(context.trace)
        engine = context.start_engine(sink.prefill_started, sink.layer_done)
        shared = context.resources(engine, lambda: sink.layers_ready)
        fetches = PrefixFetches(engine, context.attempts.counts, context.trace)
        fetches.sources.append(Workers(shared.receiver, shared.incarnation, context.links))
        if fds := context.config.store_fds:
            context.store = StoreSource.open(engine, fds, context.transport.ranks, context.cached_chunks)
            fetches.sources.append(context.store)
        roles = PrefillRole(shared, sink.attach(shared), fetches), DecodeRole(shared, fetches)
        return Roles(context, shared, roles)

    return process.run(config, build)


if __name__ == "__main__":
    start(EngineProcessConfig, run)
