"""Sparse attention: what an index chooses, by the torch kernels and by a GPU's, against its definition.

`test_models` has the families against transformers, `test_latents` what workers hand over."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.kernels import FP8, KV, Fp8KV, Index, IndexLayer, IndexQueries, Kernels, parts
from baton.engine.kernels.attention.index import chosen, hadamard
from baton.engine.model_config import IndexConfig
from tests.device import DEVICE
from tests.engine.checkpoints import load
from tests.engine.conftest import request_of, save_tiny, tokens_of
from tests.engine.kernel_checks import BF16, F16, F32, close, normal
from tests.engine.latent_step import LatentStep
from tests.engine.test_models import scores

SPANS = [(0, 1), (20, 21), (300, 301), (299, 301), (0, 40), (180, 195)]
MOST = 24


class SparseStep(LatentStep):
    """Requests that have index keys, too."""

    def __init__(
        self,
        heads: int = 4,
        size: int = 32,
        *,
        num_heads: int = 4,
        most: int = MOST,
        interleaved: bool = False,
        **sizes: Any,
    ) -> None:
        super().__init__(SPANS, num_heads, decodes=[(299, 301)], **sizes)
        index = self.of_index = IndexConfig(heads, size, most, interleaved)
        self.shape = replace(self.shape, index=index)
        tokens, blocks = len(self.metadata.slots), self.kv.shape[1:3]
        layer = IndexLayer(
            normal(size, seed=80).to(self.dtype),
            normal(size, seed=81).to(self.dtype),
            interleaved,
            None if self.dtype is F32 else hadamard(size).to(self.dtype),
        )
        parts = [normal(tokens, n, seed=82 + n).to(self.dtype) for n in (heads * size, size, heads)]
        self.index = Index(parts[0].unflatten(1, (heads, size)), parts[1], parts[2], layer)
        self.index_keys = normal(1, *blocks, 1, size, seed=79)
        if self.dtype is not F32:
            scales = self.index_keys.abs().amax(-1) / 448
            self.index_keys = (self.index_keys / scales[..., None]).to(FP8)
            self.index_scales = scales.transpose(2, 3).contiguous()

    def cache(self, device: str) -> KV:
        keys = self.index_keys.to(device, copy=True)
        return keys if self.dtype is F32 else Fp8KV(keys, self.index_scales.to(device, copy=True))

    def write(self, kernels: Kernels, device: str) -> tuple[IndexQueries, KV]:
        def put(x: Tensor) -> Tensor:
            return x.to(device, copy=True)

        made = torch.cat([part.flatten(1) for part in self.index[:3]], dim=1)  # as the product leaves them
        q, keys, weights = put(made).split([part[0].numel() for part in self.index[:3]], dim=1)
        layer = self.index.layer
        layer = IndexLayer(
            put(layer.norm),
            put(layer.norm_bias),
            layer.interleaved,
            None if layer.turn is None else put(layer.turn),
        )
        index, cache = (
            Index(q.unflatten(1, self.index.queries.shape[1:]), keys, weights, layer),
            self.cache(device),
        )
        slots = put(self.metadata.slots)
        return kernels.write_index(index, put(self.rotary), cache, slots), cache

    def attend(
        self, kernels: Kernels, device: str, queries: IndexQueries, cache: KV
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention's output, the latents, and the rotated queries of attention."""
        self.chooses = queries, cache
        return self.run(kernels, device)

    def choose(self, kernels: Kernels, tiling: Any) -> None:
        kernels.choose_positions(*self.chooses, tiling)
        self.tiling = tiling

    def chosen(self) -> dict[int, Tensor]:
        """The slots that kernels of a GPU chose, by row."""
        found: dict[int, Tensor] = {}
        for part in self.tiling if isinstance(self.tiling, list) else ():
            if (choice := getattr(part, "choice", None)) is not None:
                for row, slots in enumerate(choice.slots.cpu().long(), part.rows.start):
                    found[row] = slots[: int(choice.contexts[row - part.rows.start])]
        return found

    def queries(self) -> list[tuple[int, int]]:
        """The request and the position of each row."""
        m = self.metadata
        found = [(i, int(m.contexts[i]) - 1) for i in range(m.num_decodes)]
        for request, (start, stop) in enumerate(m.prefills, m.num_decodes):
            found += [(request, position) for position in range(start, stop)]
        return found

    def choices(self, queries: IndexQueries, cache: KV) -> list[Tensor]:
        """The slots that each row chooses, in the order of positions, by the definition in float64."""
        values, weights = (part.cpu().double() for part in queries)
        keys = cache if isinstance(cache, Tensor) else cache.values
        keys = keys.cpu().double().flatten(0, 3)
        if isinstance(cache, Fp8KV):
            keys *= cache.scales.cpu().flatten()[:, None]
        found, m = [], self.metadata
        for (request, position), q, weight in zip(self.queries(), values, weights, strict=True):
            at = torch.arange(position + 1)
            slots = m.block_tables[request].long()[at // m.block_size] * m.block_size + at % m.block_size
            scores = (weight[:, None] * (q @ keys[slots].T).clamp_min(0)).sum(0).tolist()
            best = sorted(range(position + 1), key=lambda i: (-scores[i], i))[: self.of_index.most_chosen]
            found.append(slots[sorted(best)])
        return found

    def expected_of(self, kv: Tensor, q: Tensor, choices: list[Tensor]) -> Tensor:
        """Attention's output in float64."""
        cached, up, found = kv.cpu().double().flatten(0, 2).flatten(1), self.up.double(), []
        for query, slots in zip(q.cpu().double(), choices, strict=True):
            latents, shared = cached[slots].split((self.rank, self.rope), dim=1)
            made = torch.einsum("pr,hdr->phd", latents, up)
            keys = torch.cat((made[..., : self.nope], shared[:, None].expand(-1, len(up), -1)), dim=2)
            weights = (torch.einsum("phd,hd->hp", keys, query) * self.heads.scale).softmax(dim=1)
            found.append(torch.einsum("hp,phv->hv", weights, made[..., self.nope :]))
        return torch.stack(found)


def test_of_equal_scores_the_first_are_chosen() -> None:
    scores = torch.randint(0, 4, (50, 40), generator=torch.Generator().manual_seed(3)).float()
    for row, found in zip(scores.tolist(), chosen(scores, 13), strict=True):
        best = sorted(range(40), key=lambda i: (-row[i], i))[:13]
        assert found.nonzero()[:, 0].tolist() == sorted(best)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "size", "dtype"),
    [(4, 32, F32), (20, 64, F16), pytest.param(64, 128, BF16, marks=pytest.mark.gpu)],
)
@pytest.mark.usefixtures("exact_casts")
def test_what_an_index_writes(
    triton_kernels: Kernels, heads: int, size: int, dtype: torch.dtype, interleaved: bool
) -> None:
    """Keys of the step, and of no other position; queries with all scales."""
    step = SparseStep(heads, size, interleaved=interleaved, dtype=dtype)
    (values, weights), cache = step.write(triton_kernels, DEVICE)
    (expected, of_heads), expected_cache = step.write(Kernels(), "cpu")
    bound = {F16: 0.02, BF16: 0.05}.get(dtype)  # some numbers round to the next one in FP8
    close(values.float() * weights[..., None], expected.float() * of_heads[..., None], bound)
    for ours, theirs, before in zip(
        parts(cache), parts(expected_cache), parts(step.cache("cpu")), strict=True
    ):
        if ours is None or theirs is None or before is None:
            continue  # no scales
        close(ours.float(), theirs.float(), bound)
        others = torch.ones(int(step.metadata.slots.max()) + 1, dtype=torch.bool)
        others[step.metadata.slots] = False
        found, left = (x.cpu().float().reshape(step.index_keys[..., 0].numel(), -1) for x in (ours, before))
        assert torch.equal(found[: len(others)][others], left[: len(others)][others])


@pytest.mark.cases(1)
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(
    ("heads", "block_size", "dims", "dtype", "most"),
    [
        (16, 16, (32, 16, 16, 16), F32, MOST),
        (5, 64, (64, 16, 16, 16), F16, MOST),
        # One tile of positions, four of which the last is not full, and four whole ones.
        *(
            pytest.param(heads, 64, (512, 128, 64, 128), BF16, most, marks=pytest.mark.gpu)
            for heads, most in ((128, MOST), (128, 200), (20, 256))
        ),
    ],
)
def test_decodes_and_chunks(
    triton_kernels: Kernels,
    on_cpu: bool,
    heads: int,
    block_size: int,
    dims: Any,
    dtype: torch.dtype,
    most: int,
) -> None:
    """Of contexts below and above what a query chooses, and a chunk that begins below it."""
    kernels, device = (Kernels(), "cpu") if on_cpu else (triton_kernels, DEVICE)
    size = max(32, dims[2])  # some dimensions of a key are rotated
    step = SparseStep(16, size, num_heads=heads, most=most, block_size=block_size, dims=dims, dtype=dtype)
    queries, cache = step.write(kernels, device)
    out, kv, q = step.attend(kernels, device, queries, cache)
    choices, equal = step.choices(queries, cache), 0
    for row, slots in step.chosen().items():
        equal += torch.equal(slots, choices[row])
        choices[row] = slots
    assert equal >= (1.0 if dtype is F32 else 0.9) * len(step.chosen()), "FP8 products have few bits"
    close(out, step.expected_of(kv, q, choices))


@pytest.mark.cases(1)
@pytest.mark.parametrize("largest", [1 << 15, 128], ids=["one choice", "of pieces, then of these"])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_equal_scores_and_long_contexts(
    triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch, largest: int, dtype: torch.dtype
) -> None:
    """Products are whole numbers, so many scores are equal, and 0 has two signs."""
    from baton.engine.kernels.attention import index_kernels

    monkeypatch.setattr(index_kernels, "LARGEST", largest)
    monkeypatch.setattr(index_kernels, "MOVED", 16)
    step = SparseStep(dtype=dtype)
    rng, cache = torch.Generator().manual_seed(5), step.cache(DEVICE)

    def small(shape: torch.Size) -> Tensor:
        return torch.randint(-2, 3, shape, generator=rng).float()

    keys = cache if isinstance(cache, Tensor) else cache.values
    keys.copy_(small(keys.shape))
    if isinstance(cache, Fp8KV):
        cache.scales.fill_(0.5)
    values = small(step.index.queries.shape).to(keys.dtype).to(DEVICE)
    queries = IndexQueries(values, small(step.index.weights.shape).to(DEVICE))
    step.attend(triton_kernels, DEVICE, queries, cache)
    expected, found = step.choices(queries, cache), step.chosen()
    assert all(torch.equal(slots, expected[row]) for row, slots in found.items())
    dense = sum(max(0, min(stop, MOST) - start) for start, stop in step.metadata.prefills)
    assert len(found) == len(expected) - dense


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16", "batch_invariant": True}], ids=["float32", "exact"]
)
def test_an_engine_with_graphs(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Prompts alone, in chunks beside decodes, and from the prefix cache. In the exact mode tokens do not
    depend on that."""
    reference, rng = save_tiny(tmp_path, kind, max_position_embeddings=1024), random.Random(5)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (5, 40, 130, 300)]
    prompts += [[*prompts[-1][:200], *prompts[1]]]
    requests = [request_of(i, ids, max_tokens=20, ignore_eos=True) for i, ids in enumerate(prompts)]
    sizes: dict[str, Any] = {"device": DEVICE, "num_blocks": 64, "enable_prefix_caching": True}
    engine = load(tmp_path, max_num_batched_tokens=50, max_num_seqs=4, **sizes, **settings)
    found = tokens_of(engine, requests) + tokens_of(engine, requests)
    engine.assert_whole()
    engine.close()
    if settings:
        alone = load(tmp_path, max_num_batched_tokens=512, max_num_seqs=1, **sizes, **settings)
        assert found == [*(tokens_of(alone, [each])[0] for each in requests)] * 2
        return
    for prompt, tokens in zip(prompts * 2, found, strict=True):
        assert tokens == scores(reference, prompt, tokens).argmax(-1).tolist(), f"{len(prompt)} tokens"
