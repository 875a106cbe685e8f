"""Every architecture against transformers: logits, and greedy tokens through the paged, chunked engine."""

import inspect
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.layers.ranks import Ranks
from baton.engine.layers.rotary import Rotary
from baton.engine.layers.weights import PlainFormat, Weights
from baton.engine.loader.hf import HFCheckpoint
from baton.engine.loader.hf_config import model_config_from_hf, read_config
from baton.engine.model_config import Span
from baton.router.text.model_files import context_length
from tests.device import DEVICE
from tests.engine.checkpoints import config_of, edit_json, load
from tests.engine.conftest import request_of, run, save_tiny, tokens_of

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}

DEEPSEEK_ROPE = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.2}

CLOSE = 6e-4
"""Largest error of a log probability. These random models make a relative rounding of 1e-6 up to 600 times as
large."""

QWEN2_WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}

KINDS = [
    pytest.param("Llama", {}, id="llama-gqa"),
    pytest.param("Llama", {"num_key_value_heads": 4}, id="llama-mha"),
    pytest.param("Llama", {"tie_word_embeddings": True, "attention_bias": True}, id="llama-tied-bias"),
    pytest.param("Llama", {"rope_parameters": LLAMA3_ROPE}, id="llama3-rope"),
    pytest.param(
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
        id="llama-dynamic-rope",
    ),
    pytest.param(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        id="llama-linear-rope",
    ),
    pytest.param("Llama", {"rope_parameters": YARN_ROPE}, id="llama-yarn"),
    pytest.param("Mistral", {"sliding_window": None, "head_dim": 32}, id="mistral"),
    pytest.param("Mistral", {"sliding_window": 20}, id="mistral-window"),
    pytest.param("Qwen2", {}, id="qwen2"),
    pytest.param("Qwen2", QWEN2_WINDOWS, id="qwen2-windows"),
    pytest.param("Qwen3", {"head_dim": 32}, id="qwen3"),
    pytest.param("Qwen3Moe", {"head_dim": 32, "norm_topk_prob": True}, id="qwen3-moe"),
    pytest.param("GptOss", {}, id="gpt-oss"),
    pytest.param(
        "Qwen3Moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
        id="qwen3-moe-in-one-layer",
    ),
    pytest.param("Llama4", {"rope_parameters": LLAMA3_ROPE}, id="llama4"),
    pytest.param(
        "Llama4Text",
        {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False},
        id="llama4-text-with-experts-in-every-second-layer",
    ),
    pytest.param("Phi3", {"sliding_window": 20}, id="phi3"),
    pytest.param(
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}},
        id="phi3-partly-rotated",
    ),
    pytest.param("Gemma3", {}, id="gemma3"),
    pytest.param("Gemma3Text", {"sliding_window": 256, "tie_word_embeddings": True}, id="gemma3-text-tied"),
    pytest.param("Olmo2", {}, id="olmo2"),
    pytest.param("Glm4", {}, id="glm4"),
    pytest.param("Glm4", {"attention_bias": False}, id="glm4-without-biases"),
    pytest.param("Bamba", {}, id="bamba"),
    pytest.param("GraniteMoeHybrid", {}, id="granite-moe-hybrid"),
    pytest.param("Qwen3Next", {}, id="qwen3-next"),
    pytest.param("Qwen3_5", {}, id="qwen3.5"),
    pytest.param("Qwen3_5Text", {"tie_word_embeddings": True}, id="qwen3.5-text-tied"),
    pytest.param("Qwen3_5Moe", {}, id="qwen3.5-moe"),
    pytest.param("KimiLinear", {}, id="kimi-linear"),
    pytest.param("Lfm2", {}, id="lfm2"),
    pytest.param(
        "Lfm2",
        {"conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
        id="lfm2-tied-with-biases",
    ),
    pytest.param("Lfm2Moe", {}, id="lfm2-moe"),
    pytest.param("Gemma4Text", {}, id="gemma4"),
    pytest.param("Gemma4Text", {"head_dim": 32, "global_head_dim": 32}, id="gemma4-of-equal-layers"),
    pytest.param(
        "Gemma4Text",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": None,
        },
        id="gemma4-keys-as-values",
    ),
    pytest.param("MiMoV2Flash", {}, id="mimo-v2-flash"),
    pytest.param("Step3p7", {}, id="step-3.7"),
    pytest.param("MiniMaxM2", {}, id="minimax-m2"),
    pytest.param("NemotronH", {}, id="nemotron-h"),
    pytest.param(
        "NemotronH", {"moe_latent_size": 32, "initializer_range": 0.3}, id="nemotron-h-with-latents"
    ),
    pytest.param("DeepseekV2", {}, id="deepseek-v2-lite"),
    pytest.param(
        "DeepseekV2", {"q_lora_rank": 24, "topk_method": "group_limited_greedy"}, id="deepseek-v2-with-groups"
    ),
    pytest.param("DeepseekV3", {}, id="deepseek-v3"),
    pytest.param(
        "DeepseekV3",
        {"rope_parameters": DEEPSEEK_ROPE, "kv_lora_rank": 16, "norm_topk_prob": False},
        id="deepseek-v3-yarn-with-expanded-prompts",
    ),
    pytest.param("Glm4MoeLite", {}, id="glm4-moe-lite"),
    pytest.param("DeepseekV32", {}, id="deepseek-v3.2"),
    pytest.param(
        "DeepseekV32",
        {"rope_parameters": DEEPSEEK_ROPE, "kv_lora_rank": 16},
        id="deepseek-v3.2-yarn-with-expanded-prompts",
    ),
    pytest.param("GlmMoeDsa", {}, id="glm5"),
    pytest.param(
        "GraniteMoeHybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True},
        id="granite-dense-with-positions",
    ),
    pytest.param(
        "Llama4Text",
        {"moe_layers": [1], "no_rope_layers": [0, 1, 0, 1], "attention_bias": True, "num_experts_per_tok": 2},
        id="llama4-text-with-biases-and-two-experts",
    ),
]


def known_to_transformers(kind: str) -> dict[str, Any]:
    """What a tiny model has for transformers 5.17 and older. They limit the experts of gpt-oss to 7 whatever
    the config says, and normalize all groups of a gated norm together."""
    import transformers  # not in each process that only collects these tests

    if kind == "GptOss" and not hasattr(transformers.GptOssConfig, "swiglu_limit"):
        return {"swiglu_limit": 7.0}
    if kind in ("Bamba", "GraniteMoeHybrid"):
        norm = inspect.signature(transformers.models.bamba.modeling_bamba.BambaRMSNormGated)
        return {} if "group_size" in norm.parameters else {"mamba_n_groups": 1}
    return {}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_greedy_tokens_equal_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, kind, **known_to_transformers(kind), **changes)
    reference.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 2, 5, 16, 17, 90)]
    engine = load(tmp_path, device=DEVICE, num_blocks=64, max_num_batched_tokens=24, max_num_seqs=6)
    requests = [
        request_of(i, prompt, max_tokens=12, ignore_eos=True, logprobs=5) for i, prompt in enumerate(prompts)
    ]
    results = run(engine, requests)
    engine.assert_whole()
    for request, prompt in zip(requests, prompts, strict=True):
        output = results[request.id]
        assert len(output.tokens) == 12
        expected = scores(reference, prompt, output.tokens)
        assert output.tokens == expected.argmax(-1).tolist()
        for ours, logprobs in zip(output.outputs, expected, strict=True):
            assert ours.logprobs is not None
            assert ours.logprobs.logprob == pytest.approx(float(logprobs.max()), abs=CLOSE)
            # Either of two tokens may come first whose values differ by rounding alone.
            ids, values = [*ours.logprobs.top_ids], ours.logprobs.top_logprobs
            assert len({*ids}) == 5
            assert values == pytest.approx(logprobs[ids].tolist(), abs=CLOSE)
            assert values == pytest.approx(logprobs.topk(5).values.tolist(), abs=CLOSE)


KIMI_ROPE = {
    "factor": 32.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


def test_kimi_k2_as_it_is_published(tmp_path: Path) -> None:
    """One group of experts, equal bounds of YaRN, older names of the positions' fields, a type of its own."""
    reference = save_tiny(
        tmp_path,
        "DeepseekV3",
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
        rope_parameters=KIMI_ROPE | {"rope_type": "yarn", "rope_theta": 50.0},
    )
    edit_json(
        tmp_path / "config.json",
        model_type="kimi_k2",
        rope_parameters=None,
        rope_theta=50.0,
        rope_scaling=KIMI_ROPE | {"type": "yarn"},
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        num_nextn_predict_layers=0,
    )
    assert_tokens_of(reference, tmp_path)


@pytest.mark.all
def test_qwen3_5_as_it_is_published(tmp_path: Path) -> None:
    """One tensor has all experts of a layer, and a layer predicts further tokens."""
    reference = save_tiny(tmp_path, "Qwen3_5Moe")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for experts in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.experts.{i}.{part}_proj.weight") for i in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{experts}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{experts}.experts.down_proj"] = down
    tensors |= {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.mlp.gate.weight": torch.ones(2, 2)}
    save_file(tensors, path)
    assert_tokens_of(reference, tmp_path)


def test_kimi_linear_as_it_is_published(tmp_path: Path) -> None:
    """Settings in words of their own, and layers from 1 on. A router reads the same context."""
    reference = save_tiny(tmp_path, "KimiLinear")
    config = config_of(tmp_path)
    published: dict[str, Any] = {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "mla_use_nope": True,
        "model_max_length": 200,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
        **{name: config.get(name, config.get(other)) for name, other in {
            "num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts", "num_expert_group": "n_group",
            "moe_renormalize": "norm_topk_prob",
        }.items()},
    }  # fmt: skip
    assert None not in [published[name] for name in ("num_experts", "num_shared_experts", "num_expert_group")]
    left_out = {
        "layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim",
        "num_local_experts", "num_experts_per_tok", "n_shared_experts", "n_group", "norm_topk_prob",
        "max_position_embeddings",
    }  # fmt: skip
    kept = {name: value for name, value in config.items() if name not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(kept | published))
    assert read_config(tmp_path).max_model_len == context_length(str(tmp_path), None) == 200
    assert_tokens_of(reference, tmp_path)


def assert_tokens_of(reference: Any, path: Path) -> None:
    prompt = random.Random(5).choices(range(3, 199), k=70)
    engine = load(path, device=DEVICE, num_blocks=64, max_num_batched_tokens=24, max_num_seqs=6)
    [tokens] = tokens_of(engine, [request_of(1, prompt, max_tokens=12, ignore_eos=True)])
    assert tokens == scores(reference, prompt, tokens).argmax(-1).tolist()


def test_a_cached_prefix_ends_within_an_attention_chunk(tmp_path: Path) -> None:
    """Of Llama 4, in which some layers see the chunk alone, and some the whole prefix."""
    reference = save_tiny(tmp_path, "Llama4", attention_chunk_size=20)
    rng = random.Random(7)
    first, other = ([rng.randrange(3, 199) for _ in range(n)] for n in (60, 20))
    engine = load(tmp_path, device=DEVICE, num_blocks=64, block_size=16, enable_prefix_caching=True)
    prompts = [first, first[:50] + other]
    for i, prompt in enumerate(prompts):
        request = request_of(i, prompt, max_tokens=12, ignore_eos=True)
        tokens = run(engine, [request])[request.id].tokens
        assert len(tokens) == 12
        assert tokens == scores(reference, prompt, tokens).argmax(-1).tolist()
    assert engine.stats().prefix_cache_hits == 48
    engine.assert_whole()


@pytest.mark.gpu
def test_a_shared_expert_beside_the_others_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with CUDA graphs, and without. Two streams that raced would give other tokens."""
    save_tiny(tmp_path, "Llama4", hidden_size=512, head_dim=64, intermediate_size=256)
    requests = [request_of(i, range(3, 30 + i), max_tokens=150, ignore_eos=True) for i in range(8)]

    def tokens(*, cuda_graphs: bool) -> list[list[int]]:
        engine = load(tmp_path, dtype="bfloat16", device="cuda", num_blocks=64, cuda_graphs=cuda_graphs)
        return tokens_of(engine, requests)

    found = [tokens(cuda_graphs=True), tokens(cuda_graphs=True), tokens(cuda_graphs=False)]
    monkeypatch.setattr("baton.engine.layers.mlp.MOST_BESIDE", 0)
    assert found == [tokens(cuda_graphs=True), tokens(cuda_graphs=True), tokens(cuda_graphs=False)]


@torch.inference_mode()
def scores(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities by transformers where it would generate each of the tokens: [tokens, vocabulary].

    Tokens are greedy if each is the most probable one after those before it. So one pass checks all of them.
    """
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    for window, spans in ((64, (Span(64),) * 3), (256, ())):
        save_tiny(tmp_path, "Mistral", sliding_window=window)
        model = read_config(tmp_path)
        assert (model.max_model_len, model.spans) == (256, spans)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [False, True, True]),
        ({"layer_types": None}, [False, True, True]),
        ({"layer_types": None, "max_window_layers": 2}, [False, False, True]),
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, [True, False, False]),
        ({"use_sliding_window": False}, []),
    ],
)
def test_layers_with_a_window(tmp_path: Path, changes: dict[str, Any], windows: list[bool]) -> None:
    """Older versions of transformers write no layer_types."""
    save_tiny(tmp_path, "Qwen2", **QWEN2_WINDOWS)
    config = config_of(tmp_path)
    spans = model_config_from_hf({**config, **changes}, {}, "").spans
    assert [span == Span(20) for span in spans] == windows


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 40.0, "beta_fast": None, "beta_slow": 0.5},
        {"truncate": False, "factor": 32.0},
        {"attention_factor": 1.25},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"mscale": 1.0},
        {"original_max_position_embeddings": 2, "beta_fast": 1.0},
    ],
    ids=repr,
)
def test_yarn_equals_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = save_tiny(tmp_path, "Llama", head_dim=32, rope_parameters={**YARN_ROPE, **changes})
    check_rotary(tmp_path, reference, context=256)


def check_rotary(path: Path, reference: Any, context: int) -> None:
    """The table of a model that is served with this context equals that of transformers."""
    config = replace(read_config(path), max_model_len=context)
    cpu = torch.device("cpu")
    weights = Weights(HFCheckpoint(path), torch.float32, cpu, lambda *_: None, PlainFormat(), Ranks())
    ours = Rotary(config, weights).table
    cos, sin = reference.model.rotary_emb(torch.zeros(1), torch.arange(context)[None])
    half = cos.shape[-1] // 2
    torch.testing.assert_close(ours[:, 0, :half], cos[0, :, :half])
    begin = config.head_dim // 2  # the second half of a head
    torch.testing.assert_close(ours[:, 1, begin : begin + half], sin[0, :, :half])


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.2, 2.0, 4.0, 8.0],
    "partial_rotary_factor": 0.5,
}
ORIGINAL = {"original_max_position_embeddings": 32}


@pytest.mark.parametrize("changes", [{}, {"attention_factor": 1.25}, {"factor": 4.0}], ids=repr)
def test_longrope_equals_transformers_for_the_context_that_is_served(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    reference = save_tiny(tmp_path, "Phi3", rope_parameters={**LONG_ROPE, **changes}, **ORIGINAL)
    check_rotary(tmp_path, reference, context=32)
    check_rotary(tmp_path, reference, context=256)
    short, long, longer = (load(tmp_path, max_model_len=n).model_fingerprint for n in (32, 33, 100))
    assert short != long, "keys of one would be read by the other"
    assert long == longer


def test_older_phi3_checkpoints_name_longrope_differently(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Phi3", rope_parameters=LONG_ROPE, **ORIGINAL)
    config = config_of(tmp_path)
    names = ("short_factor", "long_factor")
    older = {
        **{key: value for key, value in config.items() if key != "rope_parameters"},
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    }
    for kind in ("su", "yarn", "longrope"):
        older["rope_scaling"] = {"type": kind, **{name: LONG_ROPE[name] for name in names}}
        assert model_config_from_hf(older, {}, "older") == model_config_from_hf(config, {}, "newer")


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    """Checkpoints of Qwen name the context before scaling. Routers, which have no engine, read the same."""
    save_tiny(tmp_path, "Qwen3", rope_parameters={**YARN_ROPE, "factor": 16.0}, max_position_embeddings=40)
    assert read_config(tmp_path).max_model_len == context_length(str(tmp_path), None) == 512
