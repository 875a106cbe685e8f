"""The objects of an engine process that its roles share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from baton.engine import CacheChange, Engine, Hooks, build_engine
from baton.engine.core.live_request import LiveRequest
from baton.engine.loader import checkpoint_path, tokenizer_source
from baton.engine.loader.tokenizer_json import vocabulary
from baton.kv_names import vocabulary_fingerprint
from baton.kv_transfer import Heartbeat, TraceWriter, Transport
from baton.system.background import at_low_priority
from baton.worker import messages
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.cached_chunks import CachedChunks
from baton.worker.engine_process.embeddings import FetchedEmbeddings
from baton.worker.engine_process.engine_attempt import BatonResources, EngineAttempt
from baton.worker.engine_process.kv_events import KVEvents
from baton.worker.engine_process.paged_kv import paged_kv
from baton.worker.engine_process.prefix_fetches import PrefixLinks
from baton.worker.engine_process.shared_store import StoreSource
from baton.worker.engine_process.start import EngineProcessConfig, stand_by
from baton.worker.engine_process.to_routers import image_wanted
from baton.worker.ipc import ServiceLink


@cache
def vocabulary_of(tokenizer: str) -> str:
    """The fingerprint of a vocabulary. That of a large one takes a second. Raises ValueError if the file
    cannot be read."""
    return vocabulary_fingerprint(vocabulary(tokenizer))


@dataclass(slots=True)
class Context:
    """The objects that roles are built from. All of them live as long as the process."""

    config: EngineProcessConfig
    link: ServiceLink
    heartbeat: Heartbeat
    transport: Transport
    trace: TraceWriter
    attempts: AttemptTable[EngineAttempt]
    links: PrefixLinks = field(default_factory=PrefixLinks)
    cache_changes: list[CacheChange] = field(default_factory=list)
    """Of the engine's prefix cache, since `read_cache` was called."""
    cached_chunks: CachedChunks = field(default_factory=CachedChunks)
    kv_events: KVEvents | None = None
    store: StoreSource | None = None
    images: FetchedEmbeddings | None = None

    def resources(self, engine: Engine, layers_ready: Callable[[], int]) -> BatonResources:
        """What the attempts of this engine share. Opens its sender and its receiver. `layers_ready`: as in
        `PagedKV`, for the sender."""
        cache = paged_kv(engine, layers_ready)
        receiver = self.transport.receiver(
            cache
        )  # first: the sender has a thread, which uses the device at once
        sender = self.transport.sender(cache)
        incarnation, tick = self.config.incarnation, self.heartbeat.tick
        return BatonResources(engine, sender, receiver, self.attempts, self.trace, incarnation, tick)

    def read_cache(self) -> None:
        """Gives all readers what has changed in the prefix cache."""
        if self.cache_changes:
            for reader in (self.cached_chunks, self.kv_events, self.store):
                if reader is not None:
                    reader.read(self.cache_changes)
            self.cache_changes.clear()

    def _wait_for_turn(self) -> None:
        engine = self.config.engine
        at_low_priority(partial(vocabulary_of, tokenizer_source(engine, str(checkpoint_path(engine)))))
        self.transport.prepare(engine.device)
        self.link.send(messages.StandsBy())
        self.link.wait_for(messages.TakeOver)
        self.heartbeat.tick()
        if (files := self.config.files) is not None:
            files.take_turn()

    def start_engine(
        self,
        prefill_started: Callable[[LiveRequest], None],
        layer_done: Callable[[int, Mapping[Any, range]], bool],
    ) -> Engine:
        """Builds the engine with these hooks. Raises ValueError if the user's configuration is wrong."""
        hooks = Hooks(
            progress=lambda stage, fraction: self.link.send(messages.Progress(stage, fraction)),
            tick=self.heartbeat.tick,
            computing=self.heartbeat.set_step,
            prefill_started=prefill_started,
            layer_done=layer_done,
            cache_changed=self.cache_changes.append,
        )
        config = self.config
        engine = build_engine(
            config.engine,
            files=config.files,
            hooks=hooks,
            kept=config.kept_files,
            wait_for_turn=stand_by(config, self._wait_for_turn) if config.standby else None,
        )
        hooks.stage("preparing transfers", 0.0)
        if (made := engine.embedding_format) is not None:
            assert config.image_arenas is not None, "the service makes them for such an engine"
            transport = Transport.inherited(config.image_arenas, self.trace)
            self.images = FetchedEmbeddings(transport, made, self.link)
            engine.fetch_images(self.images)
        if engine.encoder is not None:
            engine.encoder.wants = lambda name: self.link.send(image_wanted(name, lost=False))
        return engine
