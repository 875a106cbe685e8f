"""The engine: one visible step, schedule → run → postprocess."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.config import EngineConfig
from engine.request import EngineRequest, EngineStats, KVSink, Logprobs, Output, StepResult


def nothing(*_: object) -> None:
    """The default of a callback."""


class Engine:
    model_config: Any
    dtype: torch.dtype
    model_fingerprint: str
    kv_cache: list[torch.Tensor]
    block_size: int
    num_blocks: int

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv_sink: KVSink | None = None,
        tick: Callable[[], None] = nothing,
        progress: Callable[[str, float], None] = nothing,
    ) -> None:
        raise NotImplementedError

    @property
    def blocks_free(self) -> int:
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        raise NotImplementedError

    def add(self, request: EngineRequest, *, handover: bool = False) -> None:
        raise NotImplementedError

    def reserve(self, request: EngineRequest) -> Sequence[int] | None:
        raise NotImplementedError

    def extend_reservation(self, request_id: bytes, output_ids: Sequence[int]) -> Sequence[int] | None:
        raise NotImplementedError

    def join(self, request_id: bytes, token: int, logprobs: Logprobs | None = None) -> Output:
        raise NotImplementedError

    def release(self, request_id: bytes) -> None:
        raise NotImplementedError

    def cancel(self, request_id: bytes) -> None:
        raise NotImplementedError

    def step(self) -> StepResult:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError
