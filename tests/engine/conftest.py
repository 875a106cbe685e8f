import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import Engine, EngineConfig, EngineRequest, Output, SamplingParams, build_engine
from baton.engine.api.request import NO_HOOKS, Hooks
from baton.engine.execution import draft_runner, runner, sampler
from baton.engine.execution.events import record
from baton.engine.execution.rank import Follower
from baton.engine.execution.rank_files import RankFiles
from baton.engine.kernels import Kernels
from baton.engine.model_config import ModelConfig
from baton.system.kept_pages import KeptMemory
from tests.device import DEVICE
from tests.interpreter import watch_memory

torch.set_num_threads(1)

MakeEngine = Callable[..., Engine]
"""Makes an engine with a tiny model, from fields of `EngineConfig`."""


@dataclass
class Result:
    """All results of an engine for one request."""

    outputs: list[Output] = field(default_factory=list)
    failed: str | None = None
    refused: str | None = None
    handed_back: bool = False

    @property
    def tokens(self) -> list[int]:
        return [output.token for output in self.outputs]

    @property
    def finish_reason(self) -> str:
        return self.outputs[-1].finish_reason


def run(engine: Engine, requests: Iterable[EngineRequest] = (), **add: Any) -> dict[bytes, Result]:
    """Adds the requests and steps until nothing can be computed. Returns the results by request id."""
    results: dict[bytes, Result] = {}
    for request in requests:
        engine.add(request, **add)
        results[request.id] = Result()
    while engine.loop.has_work:
        step = engine.loop.step()
        for output in step.outputs:
            result = results.setdefault(output.id, Result())
            result.outputs.append(output)
        for request_id, message in step.failed:
            results.setdefault(request_id, Result()).failed = message
        for request_id, message in step.refused:
            results.setdefault(request_id, Result()).refused = message
        for request_id in step.preempted:
            results.setdefault(request_id, Result()).handed_back = True
    return results


def tokens_of(engine: Engine, requests: Iterable[EngineRequest]) -> list[list[int]]:
    """The tokens that `run` gets for each request."""
    results = run(engine, requests)
    engine.assert_whole()
    return [result.tokens for result in results.values()]


def request_of(
    number: int, prompt_ids: Iterable[int], output_ids: Iterable[int] = (), /, **sampling: Any
) -> EngineRequest:
    """A request; greedy, unless `sampling` has a temperature."""
    priority = sampling.pop("priority", 0)
    settings: dict[str, Any] = {"temperature": 0.0, **sampling}
    params = SamplingParams(**settings)
    return EngineRequest(number.to_bytes(16), list(prompt_ids), list(output_ids), params, priority)


@pytest.fixture(scope="module")
def triton_kernels(kernel_device: str) -> Iterator[Kernels]:
    from baton.engine.kernels.triton_kernels import TritonKernels

    with pytest.MonkeyPatch.context() as patch:
        if kernel_device == "cpu":
            watch_memory(patch)
        yield TritonKernels(torch.device(kernel_device), 64)


@pytest.fixture
def one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """All checkpoints store tensors in the form of most families, as those of `save_random` do."""
    monkeypatch.setattr("baton.engine.loader.in_one_form", lambda files: files)


@pytest.fixture
def check_tokens_of_kernels(
    triton_kernels: Kernels, one_form: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Asserts that an engine with `triton_kernels` gives the tokens of one with torch kernels. They load a
    checkpoint of `save_random`."""
    requests = [request_of(i, range(3 + i, 8 + i), max_tokens=2, ignore_eos=True) for i in range(2)]

    def tokens(path: Path, device: str, **formats: Any) -> list[list[int]]:
        config = EngineConfig(
            str(path),
            dtype="float32",
            **formats,
            device=device,
            num_blocks=8,
            block_size=4,
            max_num_batched_tokens=6,
            max_num_seqs=2,
        )
        return tokens_of(build_engine(config), requests)

    def check(path: Path, **formats: Any) -> None:
        expected = tokens(path, "cpu", **formats)
        for module in ("baton.engine.execution.start", "baton.engine.layers.weights"):
            monkeypatch.setattr(f"{module}.kernels_for", lambda device, head_dim, exact=False: triton_kernels)
        assert tokens(path, DEVICE, **formats) == expected

    return check


TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}
"""Weights this large make the logits of a random model differ enough for greedy decoding to be stable."""


TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
TINY_LLAMA4: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "intermediate_size": 24,
    "intermediate_size_mlp": 96,
    "attention_chunk_size": 32,
    "floor_scale": 16,
}
"""The fourth layer has no positions."""
TINY_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 16,
    "image_size": 28,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


TINY_GEMMA3: dict[str, Any] = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
TINY_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "sliding_window": 20,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 199,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
TINY_SIGLIP = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
    "initializer_range": 0.4,
}
"""Of an image it makes 16 tokens, of 8 × 8 pixels each."""
TINY_GEMMA4_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
    "standardize": True,
    "use_clipped_linears": True,
    "initializer_range": 0.4,
}
"""A token is an area of 8 × 8 pixels."""
IMAGE_TOKEN, TINY_PIXELS = 190, 1 << 14


def tiny_llama4(kind: str, changes: dict[str, Any]) -> Any:
    """A Llama 4 that also sees images, as the published checkpoints do; "Llama4Text": one that does not."""
    import transformers

    text = transformers.Llama4TextConfig(**{**TINY, **TINY_LLAMA4, **changes})
    if kind == "Llama4Text":
        return transformers.Llama4ForCausalLM(text)
    config = transformers.Llama4Config(text_config=text.to_dict(), vision_config=TINY_VISION)
    return transformers.Llama4ForConditionalGeneration(config)


def tiny_gemma3(kind: str, changes: dict[str, Any]) -> Any:
    """As `tiny_llama4`."""
    import transformers

    text = transformers.Gemma3TextConfig(**{**TINY, **TINY_GEMMA3, **changes})
    if kind == "Gemma3Text":
        return transformers.Gemma3ForCausalLM(text)
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=TINY_SIGLIP,
        mm_tokens_per_image=16,
        boi_token_index=IMAGE_TOKEN + 1,
        eoi_token_index=IMAGE_TOKEN + 2,
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


TINY_GPT_OSS: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "sliding_window": 20,
    "swiglu_limit": 3.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 8.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}


TINY_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "attn_layer_indices": [1],
}


TINY_GRANITE: dict[str, Any] = {
    **{name: value for name, value in TINY_MAMBA.items() if name.startswith("mamba")},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "shared_intermediate_size": 32,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}
TINY_QWEN3_NEXT: dict[str, Any] = {
    **TINY_EXPERTS,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 32,
    "initializer_range": 0.1,
}
TINY_QWEN3_5: dict[str, Any] = {
    **{name: value for name, value in TINY_QWEN3_NEXT.items() if "expert" not in name and "moe" not in name},
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}
TINY_QWEN3_5_MOE = TINY_QWEN3_NEXT | TINY_QWEN3_5
TINY_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def tiny_qwen3_5(kind: str, changes: dict[str, Any]) -> Any:
    """As `tiny_llama4`, dense or with experts."""
    import transformers

    name, tiny = kind.removesuffix("Text"), tiny_of_kind(kind)
    config = {key: value for key, value in {**TINY, **tiny, **changes}.items() if key != "intermediate_size"}
    if name == "Qwen3_5":
        config["intermediate_size"] = TINY["intermediate_size"]
    text = getattr(transformers, f"{name}TextConfig")(**config)
    if kind != name:
        return getattr(transformers, f"{name}ForCausalLM")(text)
    both = getattr(transformers, f"{name}Config")(
        text_config=text.to_dict(),
        vision_config={**TINY_QWEN_VISION, "depth": 2, "patch_size": 4, "initializer_range": 0.4},
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=IMAGE_TOKEN + 1,
        vision_end_token_id=IMAGE_TOKEN + 2,
        video_token_id=IMAGE_TOKEN + 3,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(both)


TINY_QWEN3_VL = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
TINY_QWEN3_VISION = {
    **TINY_QWEN_VISION,
    "depth": 3,
    "patch_size": 4,
    "deepstack_visual_indexes": [0, 1],
    "initializer_range": 0.4,
}


TINY_QWEN2_VL = {"rope_parameters": {**TINY_QWEN3_VL["rope_parameters"], "mrope_section": [2, 3, 3]}}
del TINY_QWEN2_VL["rope_parameters"]["mrope_interleaved"]
TINY_QWEN2_VISION = {**TINY_QWEN_VISION, "depth": 3, "patch_size": 4, "initializer_range": 0.4}
TINY_SEEING = {
    "Qwen2VL": {**TINY_QWEN2_VISION, "embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2},
    "Qwen2_5_VL": {**TINY_QWEN2_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
}
"""Windows have 2 × 2 tokens."""


def tiny_qwen_vl(kind: str, changes: dict[str, Any]) -> Any:
    """As `tiny_llama4`. A token is an area of 8 × 8 pixels."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        text_config={**TINY, **tiny_of_kind(kind), **changes},
        vision_config=TINY_SEEING.get(kind, TINY_QWEN3_VISION),
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=IMAGE_TOKEN + 1,
        vision_end_token_id=IMAGE_TOKEN + 2,
        video_token_id=IMAGE_TOKEN + 3,
        tie_word_embeddings=changes.get("tie_word_embeddings", False),
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


TINY_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.8,
}
TINY_SPARSE: dict[str, Any] = TINY_LATENT | {
    "index_topk": 12,
    "index_head_dim": 32,
    "index_n_heads": 16,  # with fewer, scores are often 0, and transformers breaks no ties by position
    "initializer_range": 0.1,
}
TINY_KIMI: dict[str, Any] = {
    **{
        name: value
        for name, value in TINY_LATENT.items()
        if not name.startswith(("first_k", "q_lora", "n_rou"))
    },
    "num_local_experts": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "initializer_range": 0.1,
}
TINY_LFM2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_multiple_of": 16,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TINY_LFM2_MOE: dict[str, Any] = {
    **{name: value for name, value in TINY_LFM2.items() if not name.startswith("block")},
    **TINY_EXPERTS,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.5,
}
TINY_MINIMAX_M2: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "head_dim": 32,
    "rotary_dim": 16,
}
TINY_MIMO: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.8,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.334, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 0.334, "rope_theta": 100.0},
    },
}
TINY_NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": [
        "linear_attention",
        "moe",
        "linear_attention",
        "full_attention",
        "mlp",
        "linear_attention",
        "moe",
    ],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.8,
    "n_group": 4,
    "topk_group": 2,
    "rescale_prenorm_residual": False,
}
TINY_STEP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "head_dim": 16,
    "num_sliding_attention_heads": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "share_expert_dim": 32,
    "moe_router_scaling_factor": 1.8,
    "swiglu_limits": [0, 0, 0.5, 0],
    "swiglu_limits_shared": [0, 0, 0, 0.7],
    "rope_theta": [5000.0, 100.0, 100.0, 5000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "pad_token_id": 0,
}
TINY_OF_KIND = {
    "OlmoHybrid": {"num_hidden_layers": 4, "pad_token_id": 0},
    "Lfm3": {"layer_types": ["conv", "full_attention", "conv"], "head_dim": 16, "pad_token_id": 0},
    "DeepseekV2": TINY_LATENT | {"q_lora_rank": None},
    "DeepseekV3": TINY_LATENT,
    "DeepseekV32": TINY_SPARSE,
    "GlmMoeDsa": TINY_SPARSE | {"n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "full"]},
    "Glm4MoeLite": TINY_LATENT | {"qk_nope_head_dim": 24, "v_head_dim": 32, "n_group": 1, "topk_group": 1},
    "Glm4": {"head_dim": 32, "pad_token_id": 0},
    "Phi3": {"pad_token_id": 0},
    "GptOss": TINY_GPT_OSS,
    "Bamba": TINY_MAMBA,
    "GraniteMoeHybrid": TINY_GRANITE,
    "Qwen3Next": TINY_QWEN3_NEXT,
    "Qwen3_5": TINY_QWEN3_5,
    "Qwen3_5Moe": TINY_QWEN3_5_MOE,
    "KimiLinear": TINY_KIMI,
    "Lfm2": TINY_LFM2,
    "Lfm2Moe": TINY_LFM2_MOE,
    "MiMoV2Flash": TINY_MIMO,
    "MiniMaxM2": TINY_MINIMAX_M2,
    "NemotronH": TINY_NEMOTRON_H,
    "Step3p7": TINY_STEP,
    "Llama4": TINY_LLAMA4,
    "Gemma3": TINY_GEMMA3,
    "Gemma4": TINY_GEMMA4,
    "Qwen2VL": TINY_QWEN2_VL,
    "Qwen2_5_VL": TINY_QWEN2_VL,
    "Qwen3VL": TINY_QWEN3_VL,
    "Qwen3VLMoe": TINY_QWEN3_VL | TINY_EXPERTS | {"norm_topk_prob": True},
}


def tiny_of_kind(kind: str) -> dict[str, Any]:
    """Settings of a tiny model of this kind, beside `TINY`."""
    kind = kind.removesuffix("Text")
    return TINY_EXPERTS if kind == "Qwen3Moe" else TINY_OF_KIND.get(kind, {})


def tiny_gemma4(kind: str, changes: dict[str, Any]) -> Any:
    """As `tiny_llama4`."""
    import transformers

    text = transformers.Gemma4TextConfig(**{**TINY, **tiny_of_kind(kind), **changes})
    if kind == "Gemma4Text":
        return transformers.Gemma4ForCausalLM(text)
    config = transformers.Gemma4Config(
        text_config=text.to_dict(),
        vision_config=TINY_GEMMA4_VISION,
        audio_config=None,
        boi_token_id=IMAGE_TOKEN + 1,
        eoi_token_id=IMAGE_TOKEN + 2,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def tiny_step(kind: str, changes: dict[str, Any]) -> Any:
    """As `tiny_llama4`."""
    import transformers

    vision = {"width": 16, "layers": 1, "heads": 2, "image_size": 28}
    config = transformers.Step3p7Config(
        text_config={**TINY, **tiny_of_kind(kind), **changes}, vision_config=vision
    )
    return transformers.Step3p7ForConditionalGeneration(config)


SEES = {
    "Step3p7": tiny_step,
    "Qwen2VL": tiny_qwen_vl,
    "Qwen2_5_VL": tiny_qwen_vl,
    "Qwen3VL": tiny_qwen_vl,
    "Llama4": tiny_llama4,
    "Gemma3": tiny_gemma3,
    "Gemma4": tiny_gemma4,
    "Qwen3_5": tiny_qwen3_5,
}
"""What makes a model of a kind that also sees images."""


def save_tiny(directory: Path, kind: str, **changes: Any) -> Any:
    """Writes a tiny random model in Hugging Face format and returns transformers' own instance of it."""
    import transformers

    torch.manual_seed(0)
    for name, tiny in SEES.items():
        if kind.startswith(name):
            model = tiny(kind, changes).eval()
            break
    else:
        config = getattr(transformers, f"{kind}Config")(**{**TINY, **tiny_of_kind(kind), **changes})
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        # transformers initialises these with zeros and ones, which would prove nothing.
        if name.endswith((".bias", "_bias", "norm.weight", ".D", "layer_scalar")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith(".A_log"):  # states that outlive some tokens
            torch.nn.init.uniform_(parameter, -3.0, 0.0)
        elif name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    if kind in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe"):
        size = {"shortest_edge": 64, "longest_edge": TINY_PIXELS}
        settings = {"size": size, "patch_size": 4, "merge_size": 2, "image_mean": [0.5, 0.4, 0.3]}
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


TinyOf = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> TinyOf:
    """Checkpoints of tiny random models, by kind. No test changes them."""

    @cache
    def make(kind: str) -> Path:
        directory = tmp_path_factory.mktemp(kind)
        save_tiny(directory, kind)
        return directory

    return make


@pytest.fixture(scope="session")
def tiny_path(tiny_of: TinyOf) -> Path:
    """A tiny random Llama with grouped queries."""
    return tiny_of("Llama")


@pytest.fixture(scope="session", autouse=True)
def checked_once() -> Iterator[None]:
    """Engines of a model share the check of its modules, which takes a second. `test_modules` tests it."""
    from baton.engine.execution import module_check

    check, checked = module_check.check_modules, set[str]()

    def once(config: ModelConfig, source: str) -> None:
        if repr(config) not in checked:
            check(config, source)
            checked.add(repr(config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_check, "check_modules", once)
        yield


@pytest.fixture(scope="session")
def tiny_engine(tiny_path: Path) -> Callable[..., Engine]:
    def make(
        *,
        hooks: Hooks = NO_HOOKS,
        kept_files: Sequence[KeptMemory] = (),
        wait_for_turn: Callable[[], None] | None = None,
        **config: Any,
    ) -> Engine:
        settings: dict[str, Any] = {
            "model": str(tiny_path),
            "dtype": "float32",
            "device": DEVICE,
            "block_size": 4,
            "num_blocks": 64,
            "overlap": False,
            "cuda_graphs": False,
        }
        return build_engine(
            EngineConfig(**{**settings, **config}),
            hooks=hooks,
            kept=kept_files,
            wait_for_turn=wait_for_turn,
        )

    return make


class LateCopies:
    """Copies to the host that have come when a later `LateEvent` has passed, and have other values before."""

    def __init__(self) -> None:
        self._under_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.enqueued = self._come = 0

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.clone()
        self._under_way.append((there := torch.full_like(value, 2), value))
        self.enqueued += 1
        return there

    @torch.inference_mode()
    def come(self, count: int) -> None:
        """The first `count` since the start."""
        for _ in range(count - self._come):
            there, value = self._under_way.pop(0)
            there.copy_(value)
            self._come += 1


COPIES = LateCopies()


class LateEvent:
    """An event of a device that is late: it has passed only after a call of `synchronize`."""

    def __init__(self) -> None:
        self._event = record(torch.device(DEVICE))
        self._copies = COPIES.enqueued
        self._passed = False

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        self._event.synchronize()
        COPIES.come(self._copies)
        self._passed = True

    def elapsed_time(self, later: "LateEvent", /) -> float:
        return self._event.elapsed_time(later._event)


@pytest.fixture
def late_engine(tiny_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Makes engines with overlap. Their device finishes a step only when the engine waits for it. On a CPU,
    the host then gets what the step has sampled, too."""

    def make(**config: Any) -> Engine:
        engine = tiny_engine(**{"overlap": True, "cuda_graphs": True, **config})
        engine.runner._record = LateEvent
        if DEVICE == "cpu":
            sample = engine.runner.sample

            def sample_late(*args: Any) -> Any:
                with monkeypatch.context() as patch:
                    for module in (runner, draft_runner, sampler):
                        patch.setattr(module, "to_host", COPIES.to_host)
                    return sample(*args)

            monkeypatch.setattr(engine.runner, "sample", sample_late)
        # The real method would start a thread that waits for the event.
        engine.loop._landings.expect = lambda event: None
        return engine

    return make


def save_spelled_tokenizer(directory: Path) -> None:
    """Writes a tokenizer for the tiny models: printable ASCII, and some tokens of several characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    texts = [*map(chr, range(0x21, 0x7F)), "Ġ", "Ċ", '{"', '":', '",', "10", "true", "ab", "}}"]
    vocab = {text: i for i, text in enumerate(["<unk>", "<s>", "</s>", *texts])}
    vocab |= {f"<{i}>": i for i in range(len(vocab), TINY["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


SHOWS_IMAGES = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
{% for part in m.content %}{% if part.type == "image" %}<|image_pad|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}{% endfor %}"""


def save_seeing_tokenizer(directory: Path, written: str = "<|image_pad|>") -> None:
    """The tokenizer and the chat template of a tiny model that takes images. `written`: the token that the
    template writes for one."""
    from tokenizers import Tokenizer

    save_spelled_tokenizer(directory)
    state = json.loads((directory / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    specials = ["<|image_pad|>", "<start_of_image>", "<end_of_image>"]
    for token, name in enumerate(specials, IMAGE_TOKEN):
        vocab[name] = vocab.pop(f"<{token}>")
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(SHOWS_IMAGES.replace("<|image_pad|>", written))


@pytest.fixture(scope="session")
def spelled_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer."""
    directory = tmp_path_factory.mktemp("spelled")
    for file in tiny_path.iterdir():
        (directory / file.name).symlink_to(file)
    save_spelled_tokenizer(directory)
    return directory


def follow(config: EngineConfig, rank: int, files: RankFiles, kept: Sequence[KeptMemory]) -> None:
    Follower(config, rank, files, kept).run(lambda step: lambda layer: None)


@pytest.fixture
def memory() -> Iterator[KeptMemory]:
    """Of one rank, for engines that follow each other."""
    files = KeptMemory.create()
    yield files
    files.close()


@pytest.fixture
def ranks() -> Iterator[Callable[..., Engine]]:
    """Makes engines with several ranks, and ends them after the test."""
    groups: list[tuple[Engine, list[threading.Thread], RankFiles]] = []

    def make(path: Path, size: int, kept_files: Sequence[KeptMemory] = (), **config: Any) -> Engine:
        settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "block_size": 4, **config}
        settings = {"model": str(path), "tensor_parallel_size": size, **settings}
        files, kept = RankFiles.create(size) if size > 1 else None, kept_files
        threads = [
            threading.Thread(
                target=follow, args=(EngineConfig(**settings), rank, files, kept[rank : rank + 1])
            )
            for rank in range(1, size)
        ]
        for thread in threads:
            thread.start()
        engine = build_engine(EngineConfig(**settings), files=files, kept=kept)
        if files is not None:
            groups.append((engine, threads, files))
        return engine

    yield make
    for engine, threads, files in groups:
        engine.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), "a rank has not stopped"
        files.close()
