"""The life of an engine process of a worker, from its start to its exit code."""

import gc
from collections.abc import Callable

from baton.engine import Engine
from baton.kv_transfer import Heartbeat, TraceWriter, Transport
from baton.kv_transfer.channel import ChannelClosed
from baton.rpc import worker_pb2 as pb
from baton.system.kept_pages import CannotShareError
from baton.worker import messages
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.context import Context, vocabulary_of
from baton.worker.engine_process.embeddings import embedding_layout
from baton.worker.engine_process.engine_attempt import EngineAttempt
from baton.worker.engine_process.kv_events import KVEvents
from baton.worker.engine_process.loop import loop
from baton.worker.engine_process.offload import OffloadPump, offload_pumps
from baton.worker.engine_process.paged_kv import kv_layout, paged_kv
from baton.worker.engine_process.roles import Roles
from baton.worker.engine_process.shared_store import StoreSource
from baton.worker.engine_process.start import EXIT_START_FAILED, EXIT_TRANSFER_GONE, EngineProcessConfig
from baton.worker.ipc import ServiceLink


def run(config: EngineProcessConfig, build: Callable[[Context], Roles]) -> int:
    """Runs the engine process. Returns its exit code.

    `build` makes the engine and the roles. An exception of a step ends the process, and the supervisor starts
    a new worker.
    """
    gc.freeze()  # what imports made; the collection below would scan it for a tenth of a second
    link = ServiceLink(config.address)
    trace = TraceWriter(config.trace_path, config.name)
    transport = Transport.inherited(config.arenas, trace)
    heartbeat = Heartbeat(config.heartbeat_fd)
    kv_events = KVEvents() if config.kv_events else None
    attempts = AttemptTable[EngineAttempt](link.send)
    context = Context(config, link, heartbeat, transport, trace, attempts, kv_events=kv_events)
    heartbeat.tick()
    try:
        roles = build(context)
        engine = roles.engine
        pumps: list[OffloadPump | StoreSource] = [*offload_pumps(engine, config.engine, transport.ranks)]
        if context.store is not None:
            pumps.append(context.store)
        ready = _ready(engine)
    except ValueError as error:
        link.send(messages.StartFailed(str(error), isinstance(error, CannotShareError)))
        link.close()
        return EXIT_START_FAILED
    gc.collect()
    gc.enable()
    gc.freeze()  # these objects live as long as the process; scanning them would delay a step
    link.send(ready)
    try:
        loop(roles, context, pumps)
    except ChannelClosed:
        return EXIT_TRANSFER_GONE
    for pump in pumps:
        pump.close()
    transport.ranks.close()
    engine.close()
    context.trace.close()
    link.close()
    return 0


def _ready(engine: Engine) -> messages.EngineReady:
    """Describes the engine for the service process. Raises ValueError if the tokenizer cannot be read."""
    model, made = engine.model_config, engine.embedding_format
    described = pb.WorkerDescription(
        model_fingerprint=engine.model_fingerprint,
        content_root=engine.content_root,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        offload_blocks=sum(tier.num_places for tier in engine.offload if not tier.of_states),
        vocabulary_fingerprint=vocabulary_of(engine.tokenizer),
        attention_doubles_at=model.attention_doubles_at,
        numerics=engine.numerics,
        image_fingerprint="" if made is None else made.fingerprint,
        kept_image_tokens=engine.kept_image_tokens,
        computes_on=engine.computes_on,
        exchanges_prefixes=engine.prefix_exchange is not None,
    )
    return messages.EngineReady(
        described,
        kv_layout(engine),
        images=None if model.vision is None else model.vision.settings,
        image_layout=None if made is None else embedding_layout(made),
        sums=paged_kv(engine).sums,
    )
