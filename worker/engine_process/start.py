"""The start and the end of the engine process, which is rank 0 of an engine, and of the other ranks.

1. Read the configuration from stdin.
2. Tie the process to its parent.
3. Run, which imports torch. A standby waits before it maps the memory of KV.
4. End at once.
"""

import gc
import logging.config
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, NoReturn, TypeVar

import msgspec
import setproctitle

from baton.engine import EngineConfig
from baton.engine.execution.rank_files import RankFiles
from baton.kv_transfer import Arenas
from baton.kv_transfer.wait import end_waits_on_time
from baton.processes.children import die_with_parent
from baton.system import cpu_engines
from baton.system.background import at_low_priority, killed_first
from baton.system.kept_pages import KeptMemory
from baton.system.memory import trim

RANK_MODULE = "baton.worker.engine_process.rank_process"
EXIT_START_FAILED = 2
"""Exit code of an engine process that has sent a StartFailed with the reason. A rank has written the reason
to its `files`."""
EXIT_TRANSFER_GONE = 4
"""The same if its transfer process ended before it."""


class RankProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the process of a rank: one JSON line on stdin. All descriptors are inherited."""

    name: str  # "decode 0 rank 1"
    title: str  # prefix of the process title
    parent_pid: int
    rank: int
    files: RankFiles | None  # None: the engine has one rank
    logging: dict[str, Any]  # for logging.config.dictConfig
    engine: EngineConfig
    arenas: Arenas | None  # None: the engine hands over no KV, and has no tiers
    store_fds: Sequence[int] = ()
    """Of the shared store: memory for its units and, of rank 0, the channel to the store process."""
    kept_files: Sequence[KeptMemory] = ()
    """Of KV that outlives this process: its own and, of rank 0, those of the others. Empty: none."""
    standby: bool = False
    """Whether another process writes to that memory, until this one takes its place."""

    @property
    def process_title(self) -> str:
        return f"{self.title}: {self.name}"

    @property
    def fds(self) -> Sequence[int]:
        arenas, files = self.arenas, self.files
        return (
            *(() if arenas is None else arenas.fds),
            *(() if files is None else files.fds),
            *self.store_fds,
            *chain.from_iterable(each.fds for each in self.kept_files),
        )


class EngineProcessConfig(RankProcessConfig, frozen=True, kw_only=True):
    """The configuration of an engine process."""

    arenas: Arenas
    incarnation: int
    address: str  # of the service's socket
    heartbeat_fd: int
    trace_path: str | None
    engine_args: Sequence[str] = ()
    """As in `WorkerConfig`."""
    hold_seconds: float = 0.0
    """For which an encoder holds embeddings until a worker has fetched them."""
    kv_events: bool = False
    """Whether the service publishes `CacheEvents`."""
    rank_arenas: Sequence[Arenas] = ()
    """Of the other ranks, if this process passes them on."""
    image_arenas: Arenas | None = None
    """Of embeddings that the engine fetches from encoders. None: it fetches none."""

    @property
    def fds(self) -> Sequence[int]:
        of_ranks = chain.from_iterable(arenas.fds for arenas in self.rank_arenas)
        images = () if self.image_arenas is None else self.image_arenas.fds
        return *super().fds, *of_ranks, self.heartbeat_fd, *images


C = TypeVar("C", bound=RankProcessConfig)


def start(kind: type[C], run: Callable[[C], int]) -> NoReturn:
    """Runs a process and ends it with the exit code that `run` returns. `run` may import torch."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    begin(config.process_title + (" standby" if config.standby else ""), config.parent_pid)
    _announce(config)
    logging.config.dictConfig(config.logging)
    gc.disable()  # until the engine is built: imports make no garbage, and collection slows them by a fifth
    if config.standby:
        killed_first(config.parent_pid, first=True)
        at_low_priority(partial(import_module, "torch"))
    _end(run(config))


def stand_by(config: RankProcessConfig, turn: Callable[[], None]) -> Callable[[], None]:
    """Returns what a process of a standby calls when it needs the memory of KV. `turn` waits until it may
    have it."""

    def wait() -> None:
        gc.collect()
        gc.freeze()  # the collection when the engine is built would scan the model
        trim()
        turn()
        killed_first(config.parent_pid, first=False)
        setproctitle.setproctitle(config.process_title)
        _announce(config)

    return wait


def _announce(config: RankProcessConfig) -> None:
    """Not before the title is set, which gives the main thread another name."""
    if config.rank == 0 and config.engine.device == "cpu" and config.engine.num_threads:
        cpu_engines.announce(config.engine.num_threads)


def begin(title: str, parent_pid: int) -> None:
    """Makes this process die with its parent and ignore SIGINT and SIGTERM, and sets its title. Its waits end
    on time, since steps are launched at a time.

    Must be called before slow imports. The kernel sends SIGKILL when the parent's spawning thread ends, so
    the service spawns in its main thread. A milder signal would not end an engine inside a kernel launch. A
    parent that died before the call is detected by `parent_pid`. Ctrl-C and `kill -- -PGID` reach the whole
    process group, but only the service process orders the stop, by messages.
    """
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle.setproctitle(title)
    end_waits_on_time()


def _end(code: int) -> NoReturn:
    """Ends the process at once. Logs and output streams are flushed first.

    Python would free each object of each module first, which takes torch some tenths of a second.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
