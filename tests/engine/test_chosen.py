"""Attention to chosen positions, beside attention that masks all others."""

import pytest
import torch

from baton.engine.kernels import FP8, Fp8KV
from baton.engine.kernels.attention.chosen import attend_chosen, keep_keys, requests_of
from baton.engine.kernels.attention.paged import AttentionMetadata

BLOCK, HEADS, KV_HEADS, SIZE = 4, 4, 2, 16
TABLES = torch.tensor([[5, 1, 3], [2, 6, 0]], dtype=torch.int32)


def step() -> AttentionMetadata:
    """A request decodes at its tenth position, and a chunk of another one has its third to seventh."""
    slots = torch.tensor(
        [3 * BLOCK + 1, *(2 * BLOCK + p for p in (2, 3)), *(6 * BLOCK + p for p in range(3))]
    )
    return AttentionMetadata(BLOCK, slots, TABLES, torch.tensor([10], dtype=torch.int32), 1, [(2, 7)])


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_query_sees_the_chosen_positions_up_to_its_own(fp8: bool, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 7, BLOCK, KV_HEADS, SIZE, generator=generator)
    kv: torch.Tensor | Fp8KV = values
    if fp8:
        kv = Fp8KV(values.to(FP8), torch.full((2, 7, KV_HEADS, BLOCK), 0.5))
        values = kv.values.float() * 0.5
    q, sinks = torch.randn(6, HEADS, SIZE, generator=generator), torch.randn(HEADS, generator=generator)
    # A number behind a query's own position, and -1, stand for none.
    chosen = torch.tensor([[0, 9, 4], [2, 6, -1], [1, 3, -1], [4, 0, 5], [2, -1, -1], [6, 0, 1]])
    got = attend_chosen(q, kv, requests_of(step()), chosen, sinks, 0.3, softcap)
    for row, (request, position) in enumerate([(0, 9), *((1, p) for p in range(2, 7))]):
        seen = [p for p in chosen[row].tolist() if 0 <= p <= position]
        blocks = TABLES[request, [p // BLOCK for p in seen]].long()
        keys, of_values = values[:, blocks, [p % BLOCK for p in seen]].repeat_interleave(2, dim=2)
        logits = torch.einsum("hd,phd->hp", q[row], keys) * 0.3
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        shares = torch.cat([logits, sinks[:, None]], dim=1).softmax(1)[:, :-1]
        torch.testing.assert_close(got[row], torch.einsum("hp,phd->hd", shares, of_values))


def test_keys_of_an_index_are_those_of_the_request_in_order() -> None:
    cache, metadata = torch.full((1, 7, BLOCK, 1, 2), torch.nan), step()
    cache[0, 2, :2, 0] = torch.tensor([[0.0], [1.0]])
    _, chunk = requests_of(metadata)
    keys = keep_keys(cache, metadata.slots, chunk, torch.arange(2.0, 7.0)[None, :, None].expand(1, 5, 2))
    assert keys[0, :, 1].tolist() == [*range(7)]
    assert (chunk.start, chunk.stop) == (2, 7)
