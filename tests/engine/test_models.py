"""Every architecture against transformers: logits, and greedy tokens through the paged, chunked engine."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, build_engine
from tests.device import DEVICE

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

KINDS = [
    pytest.param("Llama", {}, id="llama-gqa"),
    pytest.param("Llama", {"num_key_value_heads": 4}, id="llama-mha"),
    pytest.param("Llama", {"tie_word_embeddings": True, "attention_bias": True}, id="llama-tied-bias"),
    pytest.param("Llama", {"rope_parameters": LLAMA3_ROPE}, id="llama3-rope"),
    pytest.param(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        id="llama-linear-rope",
    ),
    pytest.param("Mistral", {"sliding_window": None, "head_dim": 32}, id="mistral"),
    pytest.param("Qwen2", {}, id="qwen2"),
    pytest.param("Qwen3", {"head_dim": 32}, id="qwen3"),
    pytest.param("Qwen3Moe", {"head_dim": 32, "norm_topk_prob": True}, id="qwen3-moe"),
    pytest.param(
        "Qwen3Moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
        id="qwen3-moe-in-one-layer",
    ),
]


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_greedy_tokens_equal_transformers(
    kind: str, changes: dict[str, Any], tmp_path: Path, save_tiny: Any, run: Any, request_of: Any
) -> None:
    reference = save_tiny(tmp_path, kind, **changes)
    reference.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 2, 5, 16, 17, 90)]
    engine = build_engine(
        EngineConfig(
            model=str(tmp_path),
            dtype="float32",
            device=DEVICE,
            num_blocks=64,
            max_num_batched_tokens=24,
            max_num_seqs=6,
        )
    )
    requests = [
        request_of(i, prompt, max_tokens=12, ignore_eos=True, logprobs=5) for i, prompt in enumerate(prompts)
    ]
    results = run(engine, requests)
    engine.assert_whole()
    for request, prompt in zip(requests, prompts, strict=True):
        output = results[request.id]
        expected = greedy(reference, prompt, 12)
        assert output.tokens == [token for token, _ in expected]
        for ours, (_, logprobs) in zip(output.outputs, expected, strict=True):
            assert ours.logprobs.logprob == pytest.approx(float(logprobs.max()), abs=2e-4)
            top = logprobs.topk(5)
            assert ours.logprobs.top_ids == tuple(top.indices.tolist())
            assert ours.logprobs.top_logprobs == pytest.approx(top.values.tolist(), abs=2e-4)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> list[tuple[int, torch.Tensor]]:
    tokens = list(prompt)
    result = []
    for _ in range(count):
        logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        result.append((int(logprobs.argmax()), logprobs))
        tokens.append(result[-1][0])
    return result


def test_sliding_window_bounds_the_context(
    tmp_path: Path, save_tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "Mistral", sliding_window=64)
    model = build_engine(EngineConfig(model=str(tmp_path))).model_config
    assert (model.max_model_len, model.sliding_window) == (64, 64)
    assert "sliding_window" not in repr(model), "fingerprints of older workers would differ"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["requests can have 64 tokens: the model's sliding window ends the context there"]
    with pytest.raises(ValueError, match="--max-model-len 65: the model's context is 64, its sliding window"):
        build_engine(EngineConfig(model=str(tmp_path), max_model_len=65))
    caplog.clear()
    build_engine(EngineConfig(model=str(tmp_path), max_model_len=63))
    assert not caplog.records, "the window is not what ends the context"


def test_unsupported_models_are_refused(tmp_path: Path, save_tiny: Callable[..., Any]) -> None:
    save_tiny(tmp_path, "Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match=r"config\.json: rope scaling 'dynamic' is not supported"):
        build_engine(EngineConfig(model=str(tmp_path)))
    save_tiny(tmp_path, "Gemma")
    with pytest.raises(
        ValueError, match=r"architecture GemmaForCausalLM is not supported \(LlamaForCausalLM"
    ):
        build_engine(EngineConfig(model=str(tmp_path)))
