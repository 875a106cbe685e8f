"""FP8 weights: checkpoints of each kind, quantizing on load, ranks, and what cannot be used."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine import Engine, EngineConfig
from baton.engine.kernels import FP8
from baton.engine.layers.partly_quantized import PartlyQuantized
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import DeclaredWeights
from baton.engine.loader import check_model, choose_format, open_checkpoint
from tests.engine.checkpoints import assert_refused, edit_json, edited_tensors, load
from tests.engine.conftest import request_of, run, save_tiny, tokens_of
from tests.engine.test_disaggregation import Pair
from tests.engine.test_models import scores

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 2}
"""Several blocks of 128 × 128. Two ranks would cut a block of the 384 columns in the MLP."""
RANKED = {**SIZES, "intermediate_size": 512}

LATENT = {
    **RANKED, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16, "v_head_dim": 64, "moe_intermediate_size": 256, "n_shared_experts": 1,
}  # fmt: skip
"""Of DeepSeek-V3. The rows of the product that makes the latents are no multiple of 128."""
HYBRID = {
    **RANKED, "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
"""Of Qwen3-Next and Qwen3.5. A block has rows of a query and of its gate."""
MINIMAX = {
    **{name: size for name, size in RANKED.items() if not name.startswith("moe_")},
    "intermediate_size": 256, "head_dim": 64, "rotary_dim": 32,
}  # fmt: skip
MIMO = {
    **RANKED, "head_dim": 192, "v_head_dim": 128, "moe_intermediate_size": 256,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
"""A block has rows of two heads."""
KIMI = LATENT | {"layer_types": HYBRID["layer_types"], "linear_num_heads": 16, "linear_head_dim": 32}
IN_PROJECTIONS = ("in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight")
"""What is plain beside these: the projections of two numbers of each head."""
PROJECTIONS = (
    "_proj.weight",
    "_proj_with_mqa.weight",
    *IN_PROJECTIONS,
    *(f".{part}.weight" for part in ("w1", "w2", "w3", "wk", "wq_b")),
)
PLAIN = "weights_proj.weight"
Scales = Callable[[Tensor], Tensor]


def of_tensor(weight: Tensor) -> Tensor:
    return (weight.abs().max() / 448).reshape(1)


def of_scalar(weight: Tensor) -> Tensor:
    """Without a dimension."""
    return of_tensor(weight)[0]


def of_rows(weight: Tensor) -> Tensor:
    return weight.abs().amax(dim=1, keepdim=True) / 448


def of_blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax(dim=(1, 3)) / 448


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """The scale of each element."""
    if scales.numel() == 1 or scales.shape == (shape[0], 1):
        return scales.expand(shape)
    return scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": strategy,
                    "symmetric": True,
                    **weights,
                },
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    }


BLOCKS = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
KINDS: dict[str, tuple[dict[str, Any], Scales, str, torch.dtype]] = {
    "static": (
        {"quant_method": "fp8", "activation_scheme": "static"}, of_scalar, "weight_scale", torch.float32,
    ),
    "blocks": ({"quant_method": "fp8", **BLOCKS}, of_blocks, "weight_scale_inv", torch.float32),
    "compressed-tensor": (compressed("tensor"), of_tensor, "weight_scale", torch.bfloat16),
    "compressed-channel": (compressed("channel"), of_rows, "weight_scale", torch.bfloat16),
    "compressed-block": (
        compressed("block", block_structure=[128, 128]), of_blocks, "weight_scale", torch.float32,
    ),
}  # fmt: skip
"""By name: quantization_config, scales of a weight, the name of these in the checkpoint, and their dtype."""


def save_quantized(directory: Path, kind: str, model: str = "Llama", **changes: Any) -> Any:
    """Writes a tiny checkpoint. Returns transformers' model with the values that its weights stand for."""
    save_tiny(directory, model, **changes)
    save_tiny(directory / "exact", model, **changes)
    save_file(quantize(directory, kind), directory / "exact" / "model.safetensors", {"format": "pt"})
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory / "exact", dtype="float32").eval()


def quantize(directory: Path, kind: str) -> dict[str, Tensor]:
    """Quantizes the weights of a checkpoint. Returns the values that they stand for."""
    settings, scales_of, suffix, dtype = KINDS[kind]
    path = directory / "model.safetensors"
    tensors, exact = load_file(path), load_file(path)
    for name in [name for name in tensors if name.endswith(PROJECTIONS) and not name.endswith(PLAIN)]:
        weight = tensors[name].float()
        scales = scales_of(weight).to(dtype)
        each = spread(scales.float(), weight.shape)
        tensors[name] = (weight / each).clamp(-448, 448).to(FP8)
        exact[name] = tensors[name].float() * each
        stem = name.removesuffix("weight")
        tensors[stem + suffix] = scales
        if settings.get("activation_scheme") == "static":
            tensors[stem + "input_scale"] = torch.ones(())
    save_file(tensors, path)
    edit_json(directory / "config.json", quantization_config=settings)
    return exact


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 5, 17, 60)]


def tokens(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    requests = [request_of(i, prompt, max_tokens=10, ignore_eos=True) for i, prompt in enumerate(prompts)]
    return tokens_of(engine, requests)


def assert_greedy(reference: Any, prompts: list[list[int]], found: list[list[int]]) -> None:
    for prompt, answer in zip(prompts, found, strict=True):
        assert len(answer) == 10
        assert answer == scores(reference, prompt, answer).argmax(-1).tolist()


engine_of = partial(load, num_blocks=64, block_size=4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_dequantized_model(
    kind: str, tmp_path: Path, prompts: list[list[int]]
) -> None:
    """In transformers. Biases and norms stay as they are."""
    model = {"blocks": "Qwen2", "static": "Qwen3", "compressed-block": "Qwen3Moe"}.get(kind, "Llama")
    reference = save_quantized(tmp_path, kind, model, **SIZES)
    check_model(EngineConfig(str(tmp_path)))
    found = tokens(engine_of(tmp_path), prompts)
    assert_greedy(reference, prompts, found)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model", "kind"),
    [("DeepseekV3", "blocks"), ("DeepseekV3", "compressed-channel"), ("DeepseekV32", "blocks")],
)
def test_tokens_of_models_with_latents_are_those_of_the_dequantized_one(
    model: str, kind: str, tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes keys and values of latents is dequantized on a GPU, too. The weights of an index are
    plain, beside keys and queries that are not."""
    reference = save_quantized(tmp_path, kind, model, **LATENT)
    check_model(EngineConfig(str(tmp_path)))
    assert_greedy(reference, prompts, tokens(engine_of(tmp_path), prompts))
    monkeypatch.setattr("baton.engine.loader.fp8_formats.from_hopper_on", lambda device: True)
    engine = engine_of(tmp_path)
    assert isinstance(engine.runner.model.layers[0].mixer.input, PartlyQuantized) == (model == "DeepseekV32")
    assert all(len(answer) == 10 for answer in tokens(engine, prompts))
    heads = engine.runner.model.layers[0].mixer.heads
    value_dim, rank = heads.values.shape[1:]
    exact = (
        reference.model.layers[0].self_attn.kv_b_proj.weight.detach().unflatten(0, (len(heads.values), -1))
    )
    nope = exact.shape[1] - value_dim
    torch.testing.assert_close(heads.keys[:, :nope, :rank], exact[:, :nope])
    torch.testing.assert_close(heads.values, exact[:, nope:])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param("Qwen3Next", "blocks", marks=pytest.mark.long),  # as Qwen3.5, with names of its own
        ("Qwen3_5MoeText", "blocks"),
        ("Qwen3_5Text", "compressed-channel"),
        ("Qwen3_5Text", "static"),
        ("KimiLinear", "blocks"),
        ("MiniMaxM2", "blocks"),
        ("MiMoV2Flash", "blocks"),
    ],
)
def test_tokens_of_families_are_those_of_the_dequantized_model(
    model: str, kind: str, tmp_path: Path, ranks: Callable[..., Engine], prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On one rank and on two. On a GPU the matrices that are plain are products of their own."""
    sizes = {"KimiLinear": KIMI, "MiniMaxM2": MINIMAX, "MiMoV2Flash": MIMO}.get(model, HYBRID)
    reference = save_quantized(tmp_path, kind, model, **sizes)
    check_model(EngineConfig(str(tmp_path)))
    for size in (1, 2):
        assert_greedy(reference, prompts, tokens(ranks(tmp_path, size), prompts))
    monkeypatch.setattr("baton.engine.loader.fp8_formats.from_hopper_on", lambda device: True)
    engine = engine_of(tmp_path)
    assert isinstance(engine.runner.model.layers[0].mixer.input, PartlyQuantized) == model.startswith("Qwen")
    assert all(len(answer) == 10 for answer in tokens(engine, prompts))


def test_quantizing_on_load(tmp_path: Path, prompts: list[list[int]]) -> None:
    """By row. The output projection stays as it is."""
    reference = save_tiny(tmp_path, "Llama")
    plain = engine_of(tmp_path)
    exact = {
        name: (weight / of_rows(weight)).to(FP8).float() * of_rows(weight)
        for name, weight in reference.state_dict().items()
        if name.endswith("_proj.weight")
    }
    reference.load_state_dict(exact, strict=False)
    engine = engine_of(tmp_path, quantization="fp8")
    assert_greedy(reference, prompts, tokens(engine, prompts))
    assert engine.model_fingerprint != plain.model_fingerprint


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["static", "blocks", "compressed-channel", "on-load", "latents"])
def test_two_ranks_compute_the_tokens_of_one(
    kind: str, tmp_path: Path, ranks: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    config = {"quantization": "auto"}
    if kind == "latents":
        save_quantized(tmp_path, "blocks", "DeepseekV3", **LATENT)
    elif kind == "on-load":
        save_tiny(tmp_path, "Qwen3Moe")
        config = {"quantization": "fp8"}
    else:
        model = "Qwen3Moe" if kind == "compressed-channel" else "Qwen2"
        save_quantized(tmp_path, kind, model, **RANKED)
    one, two = (ranks(tmp_path, size, **config) for size in (1, 2))
    assert two.model_fingerprint == one.model_fingerprint
    assert tokens(two, prompts) == tokens(one, prompts)


@pytest.fixture
def quantized_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes as a GPU does."""
    monkeypatch.setattr("baton.engine.loader.fp8_formats.from_hopper_on", lambda device: True)


@pytest.mark.usefixtures("quantized_activations")
def test_prefill_and_decode_give_the_tokens_of_one_engine(tiny_path: Path, prompts: list[list[int]]) -> None:
    prefill, decode, single = (
        engine_of(
            tiny_path, quantization="fp8", block_size=size, max_num_batched_tokens=budget, max_num_seqs=8
        )
        for size, budget in ((4, 32), (16, 64), (4, 2048))
    )
    requests = [request_of(i, prompt, max_tokens=10, ignore_eos=True) for i, prompt in enumerate(prompts)]
    found = Pair(prefill, decode).run(requests)
    assert [found[request.id] for request in requests] == tokens(single, prompts)


@pytest.mark.usefixtures("quantized_activations")
def test_values_that_are_not_finite_fail_one_request_only(tiny_path: Path, prompts: list[list[int]]) -> None:
    """The others get the tokens that they get alone."""
    bias = {197: -1e6, 198: -1e6}
    requests = [request_of(i, prompt, max_tokens=6, logit_bias=bias) for i, prompt in enumerate(prompts)]
    victims = [request_of(100 + i, [5, 197 + i, 7], max_tokens=6) for i in range(2)]
    engine = engine_of(tiny_path, quantization="fp8")
    embedding = engine.runner.model.embedding
    embedding.weight = embedding.weight.clone()
    embedding.weight[197], embedding.weight[198] = torch.nan, torch.inf
    results = run(engine, [requests[0], victims[0], requests[1], victims[1], *requests[2:]])
    engine.assert_whole()
    for victim in victims:
        assert results[victim.id].failed == "the model's logits are not finite numbers"
    alone = engine_of(tiny_path, quantization="fp8")
    for request in requests:
        assert results[request.id].failed is None
        assert results[request.id].tokens == run(alone, [request])[request.id].tokens


def test_plans_for_gpus_elsewhere_know_the_size_of_fp8_weights(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig(str(tiny_path), quantization="fp8")
    model = open_checkpoint(config, torch.device("cpu")).config
    sizes = [
        choose_format(config, model, torch.device(device)).bytes_per_parameter(torch.bfloat16)
        for device in ("cpu", "cuda")
    ]
    assert sizes == [2, 1 + 4 / 128]


def test_a_rank_that_would_cut_a_block_is_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "blocks", **SIZES)
    config = EngineConfig(str(tmp_path))
    checkpoint = open_checkpoint(config, torch.device("cpu"))
    weight_format = choose_format(config, checkpoint.config, torch.device("cpu"))
    weights, name = DeclaredWeights(checkpoint, weight_format), "model.layers.0.mlp.down_proj"
    with pytest.raises(ValueError, match=f"cuts the blocks of {name}, .* columns begin at 192"):
        weights.linear([name], [unsharded(256)], Shard(192, 384, 384))


@pytest.mark.usefixtures("quantized_activations")
def test_experts_with_only_some_matrices_in_fp8_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "compressed-channel", "Qwen3Moe", **RANKED, moe_intermediate_size=32)
    check_model(EngineConfig(str(tmp_path)))
    with edited_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if ".1.mlp." in name and "down_proj.weight" in name]:
            tensors[name] = tensors[name].float()
            if name.endswith("_scale"):
                del tensors[name]
    assert_refused(tmp_path, r"experts of model\.layers\.1\.mlp only some matrices are in FP8")


def test_a_checkpoint_without_its_scales_is_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "static")
    with edited_tensors(tmp_path) as tensors:
        del tensors["model.layers.1.self_attn.k_proj.weight_scale"]
    assert_refused(tmp_path, r"of .*layers.1.self_attn.k_proj.* only some are in FP8")
