"""Models that transformers' modules compute with Baton's attention: their tokens are transformers' own."""

import json
import logging
import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers

from baton.engine import EngineConfig, SpeculativeConfig
from baton.engine.execution.module_check import check_modules
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.start import Sizing
from baton.engine.kernels.attention import chosen
from baton.engine.layers.ranks import Ranks
from baton.engine.layers.weights import PlainFormat, Weights
from baton.engine.loader import open_checkpoint
from baton.engine.loader.hf_config import read_config
from baton.engine.loader.modules import modules_config
from baton.engine.model_config import Span
from baton.engine.models.transformers.model import ModulesModel
from baton.engine.models.transformers.replaced import Router
from docs.lab.models import settings_of
from tests.engine.checkpoints import edit_json, load
from tests.engine.conftest import request_of, save_tiny, tokens_of
from tests.engine.test_images import SIZES, pixels_of, with_more_images
from tests.engine.test_models import scores

LENGTHS = (1, 2, 17, 48, 90, 150)
LONG = {"max_position_embeddings": 1024, "pad_token_id": 0}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {"head_dim": 32},
    "Olmo3": {"sliding_window": 20, "num_hidden_layers": 4},
    "Gemma2": {"sliding_window": 20, "head_dim": 16, "attn_logit_softcapping": 0.7},
    "SmolLM3": {},
    "Exaone4": {"sliding_window": 20, "num_hidden_layers": 4, "sliding_window_pattern": 4},
    "GptOss": {},
    "Granite": {"attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.4},
    "DeepseekV3": {},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Cohere2": {"sliding_window": 20},
    "Mistral4": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    # With an index in each layer, or in some for the layers behind them, too.
    "DeepseekV32": {},
    "GlmMoeDsa": {},
    # With states, of linear attention or convolutions.
    "Qwen3Next": {},
    "Lfm3": {},
    "OlmoHybrid": {},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    """In chunks, in one batch, and once more from the prefix cache."""
    reference = save_tiny(tmp_path, kind, **{**LONG, **KINDS[kind]})
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 199) for _ in range(length)] for length in LENGTHS]
    engine = load(
        tmp_path, num_blocks=64, max_num_batched_tokens=64, max_num_seqs=5, model_impl="transformers",
        enable_prefix_caching=True,
    )  # fmt: skip
    for first in (0, len(prompts)):
        requests = [
            request_of(first + i, prompt, max_tokens=6, ignore_eos=True) for i, prompt in enumerate(prompts)
        ]
        for prompt, tokens in zip(prompts, tokens_of(engine, requests), strict=True):
            assert tokens == scores(reference, prompt, tokens).argmax(-1).tolist(), f"{len(prompt)} tokens"


def test_an_index_scores_few_queries_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has scores of each head for all positions: for a chunk at once, they would fill the memory."""
    monkeypatch.setattr(chosen, "QUERIES", 8)
    reference = save_tiny(tmp_path, "DeepseekV32", **LONG)
    engine = load(tmp_path, num_blocks=32, max_num_batched_tokens=64, model_impl="transformers")
    indexer, queries = type(reference.model.layers[0].self_attn.indexer), list[int]()
    forward = indexer.forward

    def counted(self: Any, hidden: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        queries.append(hidden.shape[1])
        return forward(self, hidden, *args, **named)

    for module in engine.runner.model.body.modules():
        if isinstance(module, indexer):
            module.forward.forward = partial(counted, module)
    prompt = list(range(3, 103))
    (tokens,) = tokens_of(engine, [request_of(0, prompt, max_tokens=8, ignore_eos=True)])
    assert tokens == scores(reference, prompt, tokens).argmax(-1).tolist()
    assert {*queries} == {8, 4, 1}, "chunks of 64 and 36 tokens, then decodes"


def test_modules_whose_scan_begins_anew_take_token_by_token(tmp_path: Path) -> None:
    """Those of Mamba-1 read the states of a request in a pass of one token only."""
    reference = save_tiny(tmp_path, "Jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=1)
    modules = read_config(tmp_path, model_impl="transformers").modules
    assert modules is not None
    assert [layer.goes_on for layer in modules.states.values()] == [False, False]
    prompts = [list(range(3, 40)), [7]]
    engine = load(
        tmp_path, num_blocks=64, max_num_batched_tokens=16, max_num_seqs=4, model_impl="transformers"
    )
    requests = [request_of(i, prompt, max_tokens=3, ignore_eos=True) for i, prompt in enumerate(prompts)]
    for prompt, tokens in zip(prompts, tokens_of(engine, requests), strict=True):
        assert tokens == scores(reference, prompt, tokens).argmax(-1).tolist()


def test_of_a_model_that_sees_the_text_is_served(tmp_path: Path) -> None:
    """Tensors of its tower are left out."""
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    text = {"model_type": "ministral3", "vocab_size": 200, "num_key_value_heads": 2, "head_dim": 16, **sizes}
    seen = {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 16, **sizes}
    config = transformers.Mistral3Config(text_config=text, vision_config=seen)
    torch.manual_seed(0)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    prompt = list(range(3, 90))
    engine = load(tmp_path, num_blocks=32, max_num_batched_tokens=64)
    (tokens,) = tokens_of(engine, [request_of(0, prompt, max_tokens=8, ignore_eos=True)])
    assert tokens == scores(model, prompt, tokens).argmax(-1).tolist()
    assert read_config(tmp_path).vision is None


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen2VL", "Qwen3VL", "Qwen3_5"])
def test_images_equal_transformers(kind: str, tmp_path: Path) -> None:
    """With chunks that end inside an image: a tower with windows, positions along three axes in turns and in
    a row, features that layers add, and states."""
    reference = save_tiny(tmp_path, kind)
    engine = load(
        tmp_path, num_blocks=64, max_num_batched_tokens=5, max_num_seqs=4, model_impl="transformers"
    )
    pictures = [pixels_of(i, *size) for i, size in enumerate(SIZES)]
    requests, expected = with_more_images(engine, reference, tmp_path, pictures)
    assert tokens_of(engine, requests) == expected
    engine.replace_weights(engine.stage_weights(str(tmp_path)), "1")
    assert tokens_of(engine, requests[:1]) == expected[:1]
    engine.close()
    text = load(tmp_path, num_blocks=16, model_impl="transformers", language_model_only=True)
    assert text.encoder is None


@pytest.mark.parametrize(
    ("kind", "routers", "by_logits"), [("Qwen3Moe", 3, True), ("DeepseekV3", 0, False), ("Llama", 0, None)]
)
def test_common_parts_are_those_of_baton(
    kind: str, routers: int, by_logits: bool | None, tmp_path: Path
) -> None:
    """Products, norms, experts, and routers that choose as Baton's kernels do."""
    save_tiny(tmp_path, kind)
    config = EngineConfig(str(tmp_path), model_impl="transformers")
    cpu = torch.device("cpu")
    checkpoint = open_checkpoint(config, cpu)
    weights = Weights(checkpoint, torch.float32, cpu, lambda *_: None, PlainFormat(), Ranks())
    whole = ModulesModel(checkpoint.config, weights).body
    left = {
        type(part).__name__
        for part in whole.modules()
        if next(part.parameters(recurse=False), None) is not None
    }
    assert not {name for name in left if "Norm" in name or "Linear" in name}
    assert sum(isinstance(part, Router) for part in whole.modules()) == routers
    found = {part.mixture.by_logits for part in whole.modules() if hasattr(part, "mixture")}
    assert found == (set() if by_logits is None else {by_logits})


def test_the_exact_mode_is_refused(tiny_path: Path) -> None:
    with pytest.raises(ValueError, match="--batch-invariant: modules of transformers, which compute Llama"):
        load(tiny_path, model_impl="transformers", batch_invariant=True)


@pytest.mark.parametrize(
    ("impl", "error", "told"),
    [
        ("baton", RuntimeError("not permitted"), ""),
        ("transformers", RuntimeError("not permitted\nmore"), "not permitted"),
        ("transformers", NotImplementedError(), "NotImplementedError()"),
    ],
)
def test_steps_run_without_graphs_that_cannot_be_captured(
    impl: str, error: Exception, told: str, tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Own classes can: there the error ends the start."""
    runner = Mock(spec=ModelRunner)
    runner.capture.side_effect = error
    shape = read_config(tiny_path, model_impl=impl)
    sizing = Sizing(EngineConfig(str(tiny_path)), runner, Mock(), shape, None, lambda *_: None)
    with nullcontext() if impl == "transformers" else pytest.raises(RuntimeError, match="not permitted"):
        sizing.capture()
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            f"CUDA graphs cannot capture the modules of LlamaForCausalLM, so steps run without: {told}"
        ]


@pytest.mark.all
def test_encoders_of_a_small_model_fit_its_text() -> None:
    """Its class compares the width of what encoders give with that of the text."""
    settings = settings_of("MuseSparkForConditionalGeneration", "muse_spark")
    check_modules(modules_config(settings, [2], "config.json"), "config.json")


def test_an_error_without_words_is_named(tiny_path: Path) -> None:
    values = json.loads((tiny_path / "config.json").read_text())
    with (
        patch("baton.engine.loader.modules.record_calls", side_effect=ValueError),
        pytest.raises(ValueError, match=r"cannot be served by modules of transformers: ValueError\(\)"),
    ):
        modules_config(values, [2], "config.json")


def test_a_setting_of_a_wrong_type_is_named() -> None:
    """transformers names it in the second line."""
    with pytest.raises(ValueError, match=r"error for field 'vision_config': .* with value 3 doesn't match"):
        modules_config({"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": 3}, [2], "a")


def test_drafts_do_not_change_tokens(tiny_path: Path) -> None:
    requests = [request_of(i, [5, 6, 7, 5, 6, 7, 5 + i], max_tokens=24, ignore_eos=True) for i in range(3)]
    settings: dict[str, Any] = {"model_impl": "transformers", "num_blocks": 32, "overlap": True}
    drafts = SpeculativeConfig(num_speculative_tokens=3)
    plain, drafted = (
        tokens_of(load(tiny_path, **settings, speculative_config=each), requests) for each in (None, drafts)
    )
    assert plain == drafted


def test_own_classes_come_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    save_tiny(tmp_path, "Llama")
    assert read_config(tmp_path).modules is None
    assert read_config(tmp_path, model_impl="baton").modules is None
    assert not caplog.text
    assert read_config(tmp_path, model_impl="transformers").modules is not None
    assert "modules of transformers compute LlamaForCausalLM" in caplog.text
    save_tiny(tmp_path, "Olmo3", pad_token_id=0, sliding_window=20, num_hidden_layers=4)
    assert read_config(tmp_path).spans == (*[Span(20)] * 3, None)
    with pytest.raises(ValueError, match="Olmo3ForCausalLM is not supported"):
        read_config(tmp_path, model_impl="baton")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Mamba", {}, "never calls transformers' attention interface"),
        ("DeepseekV4", {}, "it has layers of type heavily_compressed_attention"),
    ],
)
def test_what_modules_cannot_do_is_refused_by_name(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, kind, pad_token_id=0, **changes)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, model_impl="transformers")


def test_what_modules_compute_otherwise_is_refused(tmp_path: Path) -> None:
    """Llama 4's layers without rotation take positions from the cache of transformers."""
    save_tiny(tmp_path, "Llama4Text")
    with pytest.raises(
        ValueError, match=r"more tokens of a prompt, beside another prompt differs by 0\.\d+ of"
    ):
        load(tmp_path, model_impl="transformers")
    load(tmp_path, model_impl="transformers", skip_model_check=True)


def test_rotation_by_the_length_of_a_step_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Arcee")
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
    edit_json(tmp_path / "config.json", rope_parameters=rope)
    with pytest.raises(ValueError, match=r"ArceeForCausalLM .*: rope scaling 'dynamic' is not supported"):
        read_config(tmp_path)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    edit_json(
        tmp_path / "config.json", architectures=["StrangeForCausalLM"], model_type="os",
        auto_map={"AutoModelForCausalLM": "modeling.StrangeForCausalLM"},
    )  # fmt: skip
    (tmp_path / "modeling.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(ValueError, match="no causal language model StrangeForCausalLM"):
        read_config(tmp_path, model_impl="transformers")
    with pytest.raises(ValueError, match="StrangeForCausalLM is not supported"):
        read_config(tmp_path)
