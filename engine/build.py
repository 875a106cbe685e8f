"""Builds an engine: from the user's configuration to a model that is loaded, measured, warm and captured."""

import logging
from collections.abc import Callable, Collection

from baton.engine.api.config import EngineConfig
from baton.engine.api.request import CacheObserver, KVSink
from baton.engine.engine import Engine
from baton.engine.execution.rank import commands, join
from baton.engine.execution.rank_files import RankFiles
from baton.engine.execution.start import start_rank
from baton.engine.grammar import Grammars
from baton.engine.loader import tokenizer_source

log = logging.getLogger(__name__)


def _nothing(*_: object) -> None:
    pass


def build_engine(
    config: EngineConfig,
    *,
    files: RankFiles | None = None,
    kv_sink: KVSink | None = None,
    cache_observer: CacheObserver | None = None,
    tick: Callable[[], None] = _nothing,
    computing: Callable[[Collection[bytes]], None] = _nothing,
    progress: Callable[[str, float], None] = _nothing,
) -> Engine:
    """Loads the model and makes it ready. Raises `ValueError` for mistakes that the user can mend.

    With `tensor_parallel_size` above 1 this is rank 0. The caller starts a process for each
    other rank. That process runs an `engine.execution.rank.Follower` with the same configuration and `files`.
    If one of them ends, the caller ends this process.

    `tick` is a sign of life: it is called for each tensor loaded and each layer of a step. `computing` is
    called with the ids of all requests under way, whenever these change. So a supervisor knows which requests
    were in a step that crashed. `progress(stage, fraction)` tells how far the start is."""

    def starting(stage: str, fraction: float) -> None:
        tick()
        progress(stage, fraction)

    device, ranks = join(config, 0, files)
    started = start_rank(config, device, ranks, starting)
    if files is not None:
        started.runner.followers = commands(config, started, files)
    model = started.model_config
    tokenizer = tokenizer_source(config, started.source)
    if config.enable_prefix_caching and started.num_slots and not started.num_copies:
        log.warning("prefix caching is off: no memory is left for copies of states; lower --max-num-seqs")
    for tier in config.offload_sizes if started.num_slots else ():
        log.warning(
            "--%s-cache-size is ignored: %s has layers with states, which only the device keeps",
            tier.name.lower(),
            model.architecture,
        )
    return Engine(
        config,
        started.runner,
        Grammars(tokenizer, model.vocab_size, model.eos_ids),
        model,
        started.model_fingerprint,
        started.content_root,
        tokenizer,
        started.cache_spec,
        started.num_blocks,
        started.num_slots,
        started.num_copies,
        started.largest,
        overlap=device.type == "cuda" if config.overlap is None else config.overlap,
        kv_sink=kv_sink,
        cache_observer=cache_observer,
        tick=tick,
        computing=computing,
    )
