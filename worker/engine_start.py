"""How an engine process begins: its configuration from stdin, its tie to the parent, only then the slow
imports."""

import gc
import logging.config
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from worker.child import begin

EXIT_START_FAILED = 2
"""Exit code of an engine process that has said why in a StartFailed."""


class EngineProcessConfig(msgspec.Struct, frozen=True):
    """One JSON line on stdin. `engine` stays encoded until the engine package, and torch with it, is
    imported."""

    name: str  # "prefill 0 engine"
    title: str  # what the process title begins with
    parent_pid: int
    address: str  # of the service's socket
    channel_fd: int  # inherited; the engine's end of the KV channel
    arena_fd: int  # inherited
    kv_slots: int
    kv_slot_bytes: int
    trace_path: str | None
    logging: dict[str, Any]  # for logging.config.dictConfig
    engine: msgspec.Raw  # engine.EngineConfig


def start(run: Callable[[EngineProcessConfig], int]) -> int:
    """`run` may import torch; it returns the exit code."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineProcessConfig)
    begin(f"{config.title}: {config.name}", config.parent_pid)
    logging.config.dictConfig(config.logging)
    gc.disable()  # until all is built: imports make no garbage, and looking for it costs them a fifth
    return run(config)
