"""Prompts of models with states that begin with one token, as vLLM's own function counts them."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from baton.vllm_worker.state_chunks import compute_as_decodes
from tests.vllm_worker.played import function

pytestmark = pytest.mark.all

BACKENDS = "vllm.v1.attention.backends"
SPLIT = "split_decodes_and_prefills"


@pytest.mark.parametrize(
    ("name", "v2", "as_decode"),
    [
        ("mamba_attn", False, True),
        ("mamba_attn", True, True),
        ("gdn_attn", False, True),
        ("gdn_attn", True, False),
    ],
)
def test_a_first_chunk_of_one_token_is_a_decode(
    name: str, v2: bool, as_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of decodes holds a step with one token of each request. Layers must count as the graph does.
    Model runner V2 has no graph for such a step of gated delta nets."""
    package, backends = ModuleType(BACKENDS), dict[str, ModuleType]()
    monkeypatch.setitem(sys.modules, BACKENDS, package)
    for module in ("mamba_attn", "gdn_attn"):
        backend = backends[module] = ModuleType(f"{BACKENDS}.{module}")
        names = {"torch": torch, "CommonAttentionMetadata": SimpleNamespace}
        setattr(backend, SPLIT, function("vllm/v1/attention/backends/utils.py", SPLIT, **names))
        setattr(package, module, backend)
        monkeypatch.setitem(sys.modules, backend.__name__, backend)

    def counted(lengths: list[int], prompts: list[bool]) -> tuple[int, int]:
        """Decodes and prompts."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        batch = SimpleNamespace(
            max_query_len=max(lengths), num_reqs=len(lengths), num_actual_tokens=sum(lengths),
            query_start_loc_cpu=starts, is_prefilling=torch.tensor(prompts),
        )  # fmt: skip
        split = getattr(backends[name], SPLIT)
        return split(batch, decode_threshold=1, treat_short_extends_as_decodes=False)[:2]

    assert counted([1, 1], [False, True]) == (1, 1), "as vLLM does it"
    for _ in range(2):
        compute_as_decodes(v2=v2)
        assert counted([1, 1], [False, True]) == ((2, 0) if as_decode else (1, 1))
        assert counted([1, 1, 3], [False, True, True]) == ((2, 1) if as_decode else (1, 2))
