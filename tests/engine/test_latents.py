"""Models with latent caches: chats with prefix hits, pairs of any groups, and what a checkpoint may have.

`test_models` has the families against transformers, `test_tensor_parallel` their ranks."""

import os
import random
from array import array
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from baton.cluster.tools.sizing import MODELS
from baton.engine import EngineRequest, SamplingParams
from baton.engine.arrange import arrange
from baton.engine.core.offload_tier import OffloadTier
from baton.engine.execution.inputs import attention_metadata, read_by_device
from baton.engine.kernels import AttentionMetadata, Kernels
from baton.engine.kernels.upload import upload
from baton.engine.loader.hf_config import model_config_from_hf
from baton.engine.model_config import LatentConfig
from baton.engine.models import cache_bytes_per_token
from baton.engine.step import Draws, Step, Variant
from baton.kv_names.cache_kinds import FP8, INDEX, LATENT, CacheArray
from baton.kv_transfer.layout import KVLayout
from tests.device import DEVICE
from tests.engine.checkpoints import assert_refused, edit_json, edited_tensors, load
from tests.engine.conftest import request_of, run, save_tiny, tokens_of
from tests.engine.latent_step import LatentStep
from tests.engine.test_models import scores
from tests.engine.test_tiers import TURNS, answers
from tests.engine.test_unequal_groups import ON_CPU, Pair, Side

FAMILIES = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "DeepseekV32", "GlmMoeDsa")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "block_size"), [*zip(FAMILIES, (16, 64, 16, 64, 16), strict=True), ("DeepseekV3", 16)]
)
def test_a_chat_goes_on_with_its_cached_latents(kind: str, block_size: int, tmp_path: Path) -> None:
    """Prompts come in chunks of 50 tokens, which are expanded or absorbed. What is left of a chunk is
    absorbed."""
    reference, rng = save_tiny(tmp_path, kind), random.Random(5)
    engine = load(
        tmp_path, device=DEVICE, num_blocks=40, block_size=block_size, max_num_batched_tokens=50,
        max_num_seqs=4, enable_prefix_caching=True,
    )  # fmt: skip
    prompt = [rng.randrange(3, 199) for _ in range(130)]
    for turn in range(2):
        request = request_of(turn, prompt, max_tokens=20, ignore_eos=True)
        tokens = run(engine, [request])[request.id].tokens
        assert tokens == scores(reference, prompt, tokens).argmax(-1).tolist()
        prompt = [*prompt, *tokens, *(rng.randrange(3, 199) for _ in range(10))]
    assert engine.stats().prefix_cache_hits >= 128
    engine.assert_whole()


def layout_of(kind: str, dtype: str, index: str = "float32") -> KVLayout:
    """Of a tiny model. The second layer of GLM-5 takes the choice of the first."""
    latent = CacheArray(LATENT, "kv", 1, 3, 16, dtype)
    key = CacheArray(INDEX, "index", 1, 1, 32, index)
    plain = {"DeepseekV32": (), "GlmMoeDsa": (1,)}.get(kind, range(3))
    return KVLayout.of([(latent,) if layer in plain else (latent, key) for layer in range(3)])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "dtype", "prefill_ranks", "decode_ranks", "exports"),
    [
        ("DeepseekV3", "auto", 1, 1, False),
        ("DeepseekV3", "fp8", 1, 1, False),
        pytest.param("DeepseekV3", "fp8", 2, 1, False, marks=ON_CPU),
        pytest.param("DeepseekV3", "auto", 1, 2, True, marks=ON_CPU),
        pytest.param("DeepseekV3", "fp8", 2, 3, False, marks=ON_CPU),
        ("DeepseekV32", "fp8", 1, 1, True),
        pytest.param("DeepseekV32", "auto", 2, 1, False, marks=ON_CPU),
        pytest.param("GlmMoeDsa", "auto", 1, 3, True, marks=ON_CPU),
    ],
)
def test_a_pair_gives_the_tokens_of_one_rank(
    tmp_path: Path, kind: str, dtype: str, prefill_ranks: int, decode_ranks: int, exports: bool
) -> None:
    """Each byte of a latent and of an index crosses once, though all ranks hold copies."""
    save_tiny(tmp_path, kind, num_attention_heads=6, num_key_value_heads=6)
    rng, sampling = random.Random(3), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 17, 64, 150)]
    prompts += [[*prompts[-1][:130], *prompts[1]]]
    requests = [EngineRequest(os.urandom(16), prompt, [], sampling) for prompt in prompts]
    expected = tokens_of(load(tmp_path, device=DEVICE, num_blocks=60, kv_cache_dtype=dtype), requests)
    layout = layout_of(kind, "float32" if dtype == "auto" else FP8)
    settings: dict[str, Any] = {"enable_prefix_caching": True, "exports": exports, "kv_cache_dtype": dtype}
    prefill = Side(
        tmp_path, layout, prefill_ranks, block_size=16, num_blocks=60, max_num_batched_tokens=50, **settings
    )
    decode = Side(tmp_path, layout, decode_ranks, block_size=64, num_blocks=30, **settings)
    with closing(prefill), closing(decode):
        pair = Pair(prefill, decode)
        assert pair.run(requests[:-1]) + pair.run(requests[-1:]) == expected
        assert prefill.sink.cached[requests[-1].id] == pair.cached[-1] == 128
        missing = sum(map(len, prompts)) - sum(pair.cached)
        assert decode.transfer.stats().bytes_received == missing * layout.bytes_per_token
        transports = prefill.transfer.stats().transports.values()
        assert ("shared_memory" in transports) == exports


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [("DeepseekV3", "auto", "fp8"), ("DeepseekV3", "fp8", "auto"), ("DeepseekV32", "fp8", "auto")],
)
def test_latents_that_are_converted(tmp_path: Path, kind: str, prefill: str, decode: str) -> None:
    """The first token is that of the format of the prefill worker. An index keeps its format."""
    save_tiny(tmp_path, kind)
    rng, sampling = random.Random(3), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 64, 150)]
    requests = [EngineRequest(os.urandom(16), prompt, [], sampling) for prompt in prompts]
    expected = tokens_of(load(tmp_path, device=DEVICE, num_blocks=60, kv_cache_dtype=prefill), requests)
    layouts = {"auto": "float32", "fp8": FP8}
    sides = [
        Side(
            tmp_path, layout_of(kind, layouts[dtype]), 1, block_size=size, num_blocks=60,
            kv_cache_dtype=dtype,
        )
        for dtype, size in ((prefill, 16), (decode, 64))
    ]  # fmt: skip
    with closing(sides[0]), closing(sides[1]):
        found = Pair(*sides).run(requests)
    assert [tokens[0] for tokens in found] == [tokens[0] for tokens in expected]
    assert [len(tokens) for tokens in found] == [6] * 3


def test_an_index_in_fp8_is_handed_over(tmp_path: Path) -> None:
    """As on GPUs. Between two workers an index in another format has another name."""
    save_tiny(tmp_path, "GlmMoeDsa")
    rng, sampling = random.Random(3), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 64, 150)]
    requests = [EngineRequest(os.urandom(16), prompt, [], sampling) for prompt in prompts]
    settings: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
    expected = tokens_of(load(tmp_path, device=DEVICE, num_blocks=60, **settings), requests)
    layout = layout_of("GlmMoeDsa", "bfloat16", FP8)
    assert layout.bytes_per_token == 3 * 48 * 2 + 2 * (32 + 4)
    assert layout.fingerprint != layout_of("GlmMoeDsa", "bfloat16").fingerprint
    sides = [Side(tmp_path, layout, 1, block_size=size, num_blocks=60, **settings) for size in (16, 64)]
    with closing(sides[0]), closing(sides[1]):
        assert Pair(*sides).run(requests) == expected


def test_quality_of_latents_in_fp8(tmp_path: Path) -> None:
    """A random checkpoint whose answers are not all equally likely. Measured: 0.957 of the tokens are
    those of transformers, and their perplexity is 1.007 times the least. A Llama of this kind with KV in FP8
    has 0.969 and 1.001."""
    reference, rng = save_tiny(tmp_path, "DeepseekV3", initializer_range=0.1), random.Random(7)
    prompts = [[rng.randrange(3, 199) for _ in range(100)] for _ in range(8)]
    requests = [request_of(i, prompt, max_tokens=32, ignore_eos=True) for i, prompt in enumerate(prompts)]
    engine = load(tmp_path, device=DEVICE, num_blocks=99, kv_cache_dtype="fp8")
    chosen, best, equal = 0.0, 0.0, 0
    for prompt, tokens in zip(prompts, tokens_of(engine, requests), strict=True):
        logprobs = scores(reference, prompt, tokens).log_softmax(-1)
        chosen += float(logprobs[range(32), tokens].sum())
        best += float(logprobs.amax(-1).sum())
        equal += int((logprobs.argmax(-1) == torch.tensor(tokens)).sum())
    assert equal >= 0.92 * 256
    assert (best - chosen) / 256 <= 0.02, "in nats, a perplexity of 1.02 times the least"


@pytest.mark.all
@pytest.mark.parametrize("kind", [pytest.param("DeepseekV3", marks=pytest.mark.long), "GlmMoeDsa"])
def test_tokens_are_the_same_with_a_tier_and_preemptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(OffloadTier, "pays", lambda *_: True)
    save_tiny(tmp_path, kind)
    turns = TURNS[:12]
    expected = answers(load(tmp_path, num_blocks=200, block_size=4), turns)
    engine = load(
        tmp_path, num_blocks=30, block_size=4, enable_prefix_caching=True, max_num_seqs=4,
        host_cache_size=1 << 20,
    )  # fmt: skip
    assert answers(engine, turns) == expected
    stats = engine.stats()
    assert stats.preemptions
    assert stats.offload[-1].loaded_tokens > 100


def test_a_token_has_one_latent_in_each_layer(tmp_path: Path) -> None:
    save_tiny(tmp_path, "DeepseekV3")
    engine = load(tmp_path)
    assert cache_bytes_per_token(engine.cache_spec) == 3 * (32 + 16) * 4
    engine = load(tmp_path, kv_cache_dtype="fp8")
    assert cache_bytes_per_token(engine.cache_spec) == 3 * (32 + 16 + 3 * 4), "a scale for 16 numbers"
    save_tiny(tmp_path, "GlmMoeDsa")
    engine = load(tmp_path)
    assert cache_bytes_per_token(engine.cache_spec) == 3 * (32 + 16) * 4 + 2 * 32 * 4
    engine = load(tmp_path, dtype="bfloat16")
    assert cache_bytes_per_token(engine.cache_spec) == 3 * (32 + 16) * 2 + 2 * (32 + 4), "an index in FP8"


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    save_tiny(tmp_path, "DeepseekV3", num_nextn_predict_layers=0)
    requests = [request_of(0, range(3, 40), max_tokens=10, ignore_eos=True)]
    plain = load(tmp_path)
    with edited_tensors(tmp_path) as tensors:
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    assert_refused(tmp_path, r"1 tensors are unknown to DeepseekV3ForCausalLM, such as model\.layers\.3\.")
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1)
    engine = load(tmp_path)
    assert engine.model_fingerprint == plain.model_fingerprint
    assert tokens_of(engine, requests) == tokens_of(plain, requests)


@pytest.mark.parametrize(
    ("nope", "rank", "value", "least"),
    [
        pytest.param(128, 512, 128, 171, id="deepseek-v3"),
        pytest.param(192, 512, 256, 399, id="glm-4.7-flash"),
    ],
)
def test_chunks_are_expanded_from_the_length_that_pays(nope: int, rank: int, value: int, least: int) -> None:
    """For each position and head, as many multiplications are saved as making its key and value costs."""
    shape = LatentConfig(None, rank, nope, 64, value, 1.0)
    model = replace(model_config_from_hf(MODELS["glm-4.7-flash"], {}, ""), latent=shape)
    assert model.kernel_head_dim == 256
    assert replace(model, latent=replace(shape, rank=500)).kernel_head_dim == 576, "a GPU refuses it"
    assert shape.min_expanded_queries == least
    saved = 2 * rank - nope - value
    assert (least - 1) * saved <= rank * (nope + value) < least * saved


@pytest.mark.all
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("DeepseekV3", {}, marks=pytest.mark.long),
        ("GlmMoeDsa", {"indexer_types": ["full", "shared"]}),
    ],
)
@torch.inference_mode()
def test_chunks_that_attend_between_graphs(
    triton_kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
) -> None:
    """Short chunks are absorbed, long ones expanded. Padding of the decodes is in the rows of the chunks. A
    layer of GLM-5 takes the choice of the one before it."""
    for module in ("baton.engine.execution.start", "baton.engine.layers.weights"):
        monkeypatch.setattr(f"{module}.kernels_for", lambda device, head_dim, exact=False: triton_kernels)
    save_tiny(tmp_path, kind, num_hidden_layers=2, **changes)
    runner = load(tmp_path, device=DEVICE, block_size=16, num_blocks=9).runner
    tables = [array("i", blocks) for blocks in ([2], [4, 0], [8, 1], [3, 5, 6])]
    nothing = Draws(*(np.zeros(0, np.float32) for _ in Draws._fields))

    def tensors(starts: list[int], stops: list[int], decodes: int) -> tuple[Step, dict[str, torch.Tensor]]:
        tokens = [3 + i for start, stop in zip(starts, stops, strict=True) for i in range(start, stop)]
        step = arrange(
            tokens, starts, stops, tables, [], Variant.GREEDY, nothing,
            num_decodes=decodes, hands_over=False, block_size=16, table_width=4,
        )  # fmt: skip
        arrays = read_by_device(step)
        return step, dict(zip(arrays, upload(list(arrays.values()), torch.device(DEVICE)), strict=True))

    def attention(step: Step, of: dict[str, torch.Tensor]) -> AttentionMetadata:
        return attention_metadata(of, block_size=16, num_decodes=step.decode_rows, prefills=step.prefills)

    step, before = tensors([0] * 4, [8, 20, 17, 3], 0)
    runner.forward(before, attention(step, before), lambda _: None)
    step, now = tensors([8, 20, 17, 3], [9, 21, 22, 43], 2)
    expected = runner.forward(now, attention(step, now), lambda _: None)
    apart = runner.attention.apart(len(step.token_ids), runner.device)
    assert apart is not None
    memory, attends = apart
    memory.out.fill_(torch.nan)
    padded = now | {
        "contexts": F.pad(now["contexts"], (0, 6)), "block_tables": F.pad(now["block_tables"], (0, 0, 0, 4))
    }  # fmt: skip
    graph = attention_metadata(padded, block_size=16, num_decodes=8, prefills=[], apart=memory)
    torch.testing.assert_close(runner.forward(now, graph, attends(attention(step, now))), expected)


def test_absorbed_and_expanded_attention_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    step = LatentStep([(20, 21), (0, 5), (3, 40), (60, 95)])
    found = []
    for least in (1, 1000):
        monkeypatch.setattr(LatentConfig, "min_expanded_queries", least)
        found.append(step.run(Kernels(), "cpu", exact=True)[0])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], step.expected())


@pytest.mark.parametrize("span", [(0, 300), (0, 1), (40, 41)])
def test_rows_of_one_head_are_dense(span: tuple[int, int]) -> None:
    """A rank may have one head, and a step one request: the product that follows takes dense rows."""
    step = LatentStep([span], heads=1, dims=(32, 48, 16, 16))
    out, _, _ = step.run(Kernels(), "cpu")
    assert out.flatten(1).is_contiguous()
