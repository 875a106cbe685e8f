"""The dtype of states: what checkpoints name, what the user says, and what narrower states change."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.loader.hf_config import model_config_from_hf
from baton.worker.engine_process.paged_kv import kv_layout
from tests.device import DEVICE
from tests.engine.checkpoints import assert_refused, config_of, edited_copy
from tests.engine.conftest import MakeEngine, TinyOf, request_of, tokens_of
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
    with pytest.raises(ValueError, match=r"--state-dtype bfloat16: heads of .* have no states; leave it out"):
        tiny_engine(model=str(tiny_of(kind)), state_dtype="bfloat16")


def test_the_user_chooses_and_the_start_says_what_a_narrower_state_saves(
    tiny_of: TinyOf, tiny_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = str(tiny_of("Bamba"))
    silent_engine = tiny_engine(model=path, enable_prefix_caching=True)
    silent = caplog.text
    assert "; states: float32, " in silent
    assert "the checkpoint names no dtype; --state-dtype bfloat16 would take" in silent
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


@pytest.mark.all
@pytest.mark.skipif(
    DEVICE == "cuda", reason="exact kernels of a GPU are for 16 bits; all else is float32 here"
)
@pytest.mark.parametrize("kind", ["Bamba", "Qwen3Next", "KimiLinear"])
def test_rounded_states_change_the_scores_of_a_text_little(
    kind: str, tiny_of: TinyOf, tiny_engine: MakeEngine
) -> None:
    """In float32 but for the states, which are rounded after each of the tokens. Weights are random, which
    makes models sensitive."""

    def scores(dtype: str) -> torch.Tensor:
        engine = tiny_engine(
            model=str(tiny_of(kind)), state_dtype=dtype, batch_invariant=True, max_num_seqs=1
        )
        request = request_of(1, PROMPT, max_tokens=1, prompt_logprobs=0)
        pieces = of_prompts(engine, [request])[request.id]
        return torch.from_numpy(np.concatenate([np.frombuffer(x.logprobs, np.float32) for x in pieces]))

    exact = scores("float32")
    for dtype, bound in (("bfloat16", 5e-2), ("float16", 5e-3)):
        difference = scores(dtype) - exact
        assert difference.abs().max() > 0
        assert difference.abs().median() < bound, "a token may go to another expert, so not the mean"


def test_a_whole_life_with_narrow_states(tiny_of: TinyOf, tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(model=str(tiny_of("Bamba")), state_dtype="bfloat16")
    requests = [request_of(i, PROMPT[: 9 + 20 * i], max_tokens=9, ignore_eos=True) for i in range(3)]
    together = tokens_of(engine, requests)
    assert [tokens_of(engine, [request])[0] for request in requests[:1]] == together[:1]
    engine.assert_whole()
