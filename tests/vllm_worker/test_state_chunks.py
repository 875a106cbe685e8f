"""Prompts of models with states that begin with one token, as vLLM's own function counts them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from baton.vllm_worker.state_chunks import compute_as_decodes
from tests.vllm_worker.played import function

BACKENDS = "vllm.v1.attention.backends"
SPLIT = "split_decodes_and_prefills"


def test_a_first_chunk_of_one_token_is_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of decodes holds a step with one token of each request. Layers must count as the graph does."""
    names = {"torch": torch, "CommonAttentionMetadata": SimpleNamespace}
    backend = ModuleType(f"{BACKENDS}.mamba_attn")
    setattr(backend, SPLIT, function("vllm/v1/attention/backends/utils.py", SPLIT, **names))
    package = ModuleType(BACKENDS)
    package.mamba_attn = backend  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, BACKENDS, package)
    monkeypatch.setitem(sys.modules, backend.__name__, backend)

    def counted(lengths: list[int], prompts: list[bool]) -> tuple[int, int]:
        """Decodes and prompts."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        batch = SimpleNamespace(
            max_query_len=max(lengths), num_reqs=len(lengths), num_actual_tokens=sum(lengths),
            query_start_loc_cpu=starts, is_prefilling=torch.tensor(prompts),
        )  # fmt: skip
        split = getattr(backend, SPLIT)
        return split(batch, decode_threshold=1, treat_short_extends_as_decodes=False)[:2]

    assert counted([1, 1], [False, True]) == (1, 1), "as vLLM does it"
    for _ in range(2):
        compute_as_decodes()
        assert counted([1, 1], [False, True]) == (2, 0)
        assert counted([1, 1, 3], [False, True, True]) == (2, 1)
