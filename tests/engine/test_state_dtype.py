"""The dtype of states: what checkpoints name, what the user says, and what narrower states change."""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.loader.hf_config import model_config_from_hf
from baton.worker.engine_process.paged_kv import kv_layout
from tests.device import DEVICE
from tests.engine.checkpoints import assert_refused, config_of, edited_copy
from tests.engine.conftest import MakeEngine, TinyOf, request_of, save_tiny, tokens_of
from tests.engine.random_checkpoints import save_random
from tests.engine.test_exact import built, different_tokens
from tests.engine.test_prompt_logprobs import scores as of_prompts

PROMPT = [(7 * i * i + 5 * i) % 197 + 3 for i in range(150)]


@pytest.mark.parametrize(
    ("kind", "said", "dtype"),
    [
        ("Bamba", {}, "float32"),
        ("Bamba", {"dtype": "bfloat16"}, "float32"),
        ("Bamba", {"mamba_ssm_dtype": "bfloat16"}, "bfloat16"),
        ("Qwen3Next", {"mamba_ssm_dtype": "torch.float16"}, "float16"),
        ("NemotronH", {"mamba_ssm_cache_dtype": "bfloat16"}, "bfloat16"),
        ("NemotronH", {"mamba_ssm_cache_dtype": "auto"}, "float32"),
        ("KimiLinear", {"mamba_ssm_dtype": None}, "float32"),
    ],
    ids=repr,
)
def test_states_have_the_dtype_that_the_checkpoint_names(
    kind: str, said: dict[str, Any], dtype: str, tiny_of: TinyOf
) -> None:
    """`mamba_ssm_dtype` is Qwen3.5's name, `mamba_ssm_cache_dtype` that of Nemotron-H (transformers 5.23)."""
    config = {key: value for key, value in config_of(tiny_of(kind)).items() if "ssm" not in key} | said
    if kind == "NemotronH":
        config |= {key: value for key, value in config_of(tiny_of(kind)).items() if key == "ssm_state_size"}
    state = model_config_from_hf(config, {}, "a config").state
    assert state is not None
    assert state.dtype == dtype


def test_a_dtype_that_states_cannot_have_is_refused(tiny_of: TinyOf, tmp_path: Path) -> None:
    assert_refused(edited_copy(tiny_of("Bamba"), tmp_path, mamba_ssm_dtype="fp8"), "mamba_ssm_dtype 'fp8'")


@pytest.mark.parametrize("kind", ["Llama", "Lfm2"])
def test_a_model_without_states_of_heads_has_no_dtype_for_them(
    kind: str, tiny_of: TinyOf, tiny_engine: MakeEngine
) -> None:
    with pytest.raises(
        ValueError, match=r"--advanced.state-dtype bfloat16: heads of .* have no states; leave it out"
    ):
        tiny_engine(model=str(tiny_of(kind)), state_dtype="bfloat16")


def test_a_gguf_file_has_no_states(shallow_model_path: Path, tiny_engine: MakeEngine) -> None:
    with pytest.raises(
        ValueError, match=r"--advanced.state-dtype bfloat16: heads of .* have no states; leave it out"
    ):
        tiny_engine(model=str(shallow_model_path), state_dtype="bfloat16")


def test_the_user_chooses_and_the_start_says_what_a_narrower_state_saves(
    tiny_of: TinyOf, tiny_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = str(tiny_of("Bamba"))
    silent_engine = tiny_engine(model=path, enable_prefix_caching=True)
    silent = caplog.text
    assert "; states: float32, " in silent
    assert "the checkpoint names no dtype; --advanced.state-dtype bfloat16 would take" in silent
    caplog.clear()
    narrow = tiny_engine(model=path, state_dtype="bfloat16", enable_prefix_caching=True)
    assert "; states: bfloat16, " in caplog.text
    assert "names no dtype" not in caplog.text
    dtypes = {array.dtype for layer in narrow.cache_arrays for array in layer if array.name == "ssm"}
    assert dtypes == {"bfloat16"}
    assert narrow.content_root != silent_engine.content_root
    assert narrow.model_fingerprint == silent_engine.model_fingerprint, "a router takes both"
    sent, other = kv_layout(narrow), kv_layout(silent_engine)
    assert (sent.fingerprint, sent.dtypes.states, other.dtypes.states) == (
        other.fingerprint,
        "bfloat16",
        "float32",
    )
    whole, half = (sum(x.bytes for x in layout.arrays if x.name == "ssm") for layout in (other, sent))
    assert half / whole == 0.5, "of the bytes of a handover"


@pytest.mark.all
@pytest.mark.parametrize("kind", ["Bamba", "KimiLinear"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("one_form")
def test_exact_steps_round_after_each_token(kind: str, dtype: str, tmp_path: Path) -> None:
    """However a prompt is cut, and whether it is decoded: in one step a state would be rounded once."""
    save_random(tmp_path, kind, vocab_size=1000)
    engine = built(tmp_path, state_dtype=dtype, block_size=64, num_blocks=32, enable_prefix_caching=True)
    assert different_tokens(engine) == 0
    assert dtype in engine.numerics


KINDS = "Bamba", "GraniteMoeHybrid", "NemotronH", "Qwen3Next", "Qwen3_5Text", "KimiLinear"
on_cpu = pytest.mark.skipif(
    DEVICE == "cuda", reason="exact kernels of a GPU are for 16 bits, this is float32"
)


def scores_of(make: MakeEngine, path: Path, dtype: str, text: list[int]) -> np.ndarray:
    """The log probability of each token of a text but the first one. In float32 but for the states, which are
    rounded after each token."""
    engine = make(
        model=str(path), state_dtype=dtype, batch_invariant=True, max_num_seqs=1, num_blocks=600,
        max_num_batched_tokens=256,
    )  # fmt: skip
    request = request_of(1, text, max_tokens=1, prompt_logprobs=0)
    pieces = of_prompts(engine, [request])[request.id]
    engine.close()
    return np.concatenate([np.frombuffer(x.logprobs, np.float32) for x in pieces])


def of_transformers(model: Any, dtype: torch.dtype, text: list[int]) -> np.ndarray:
    """The same by transformers, token by token, with a cache that keeps states in this dtype."""
    found, cache = list[float](), None
    for position, (token, following) in enumerate(pairwise(text)):
        # Bamba of transformers 5.23 takes every such token for the first one, unless it is told the position.
        at = torch.tensor([[position]])
        output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True, position_ids=at)
        if cache is None:
            cache = output.past_key_values
            for states in (
                layer.recurrent_states for layer in cache.layers if hasattr(layer, "recurrent_states")
            ):
                states.update({i: x.to(dtype) for i, x in states.items() if x is not None})
        found.append(float(output.logits[0, -1].log_softmax(-1)[following]))
    return np.array(found, np.float32)


@on_cpu
@pytest.mark.all
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_states_are_rounded_as_transformers_rounds_them(
    kind: str, tiny_engine: MakeEngine, tmp_path: Path
) -> None:
    """Sums of float32 differ in their last bits, so a few numbers are rounded the other way: of those in
    float16 about one in 200, which makes a tenth of what rounding changes."""
    model, text = save_tiny(tmp_path, kind), PROMPT[:90]
    plain = of_transformers(model, torch.float32, text)
    for dtype in ("bfloat16", "float16"):
        ours = scores_of(tiny_engine, tmp_path, dtype, text)
        same = of_transformers(model, getattr(torch, dtype), text)
        error, rounding = (np.median(np.abs(ours - other)) for other in (same, plain))
        assert error < rounding / 4


@on_cpu
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_states_change_the_scores_of_a_long_text_little(
    kind: str, tiny_engine: MakeEngine, tmp_path: Path
) -> None:
    """States that forget a part of 0.1 to 5 % with each token, as those of published models do. What rounding
    changes does not grow with the text: so the nearest number will do. Weights are random, which makes models
    sensitive: logarithms of probabilities are about -6 to -10."""
    model = save_tiny(tmp_path, kind, max_position_embeddings=4096)
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            torch.nn.init.uniform_(parameter, -7.0, -3.0)
    model.save_pretrained(tmp_path)
    text = [(7 * i * i + 5 * i) % 197 + 3 for i in range(2000)]
    exact = scores_of(tiny_engine, tmp_path, "float32", text)
    for dtype, bound in (("bfloat16", 6e-2), ("float16", 2e-2)):
        difference = scores_of(tiny_engine, tmp_path, dtype, text) - exact
        quarters = [np.median(np.abs(part)) for part in np.array_split(difference, 4)]
        assert 0 < max(quarters) < bound
        assert quarters[3] < 1.5 * quarters[1]
        assert abs(difference.mean()) < bound / 3, "the text is as probable"


def test_a_whole_life_with_narrow_states(tiny_of: TinyOf, tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(model=str(tiny_of("Bamba")), state_dtype="bfloat16")
    requests = [request_of(i, PROMPT[: 9 + 20 * i], max_tokens=9, ignore_eos=True) for i in range(3)]
    together = tokens_of(engine, requests)
    assert [tokens_of(engine, [request])[0] for request in requests[:1]] == together[:1]
    engine.assert_whole()
