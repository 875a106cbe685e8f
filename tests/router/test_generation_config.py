"""Sampling defaults from generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.router.api import responses
from baton.router.api.jobs import sampling_defaults, shown
from baton.router.text.tokenizer import ModelTokenizer

from .conftest import make_cluster

QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 2]}
DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def written(path: Path, content: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(content))
    return path


def test_the_defaults_come_from_the_chosen_file(tmp_path: Path):
    assert shown(sampling_defaults("auto", tmp_path)) == {}, "the model needs no such file"
    model = written(tmp_path, QWEN)
    assert shown(sampling_defaults("auto", model)) == DEFAULTS
    assert shown(sampling_defaults("vllm", model)) == {}
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other", {"max_new_tokens": 9, "repetition_penalty": 1.05})
    assert shown(sampling_defaults(str(other), model)) == {"max_tokens": 9, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("content", "reason"),
    [({"temperature": -1}, "temperature"), ({"top_k": "20"}, "top_k"), ([], "generation_config.json")],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: Any, reason: str):
    with pytest.raises(ValueError, match=f"--advanced.generation-config auto.*{reason}"):
        sampling_defaults("auto", written(tmp_path, content))


def test_a_chosen_directory_must_have_the_file(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read"):
        sampling_defaults(str(tmp_path / "none"), tmp_path)


@pytest.mark.parametrize("chosen", [False, True])
async def test_requests_get_the_defaults_unless_they_say_otherwise(
    tokenizer: ModelTokenizer, tmp_path: Path, chosen: bool
):
    """`max_new_tokens` limits requests that set `max_tokens` only if the directory was chosen."""
    model = written(tmp_path, {**QWEN, "max_new_tokens": 9})
    defaults = sampling_defaults(str(model) if chosen else "auto", model)
    async with make_cluster(tokenizer, tmp_path, defaults=defaults) as cluster:
        for body, expected in (
            ({"max_tokens": None}, (0.6, 20, 0.95, 9)),
            ({"max_tokens": 4, "temperature": 0, "top_k": -1, "top_p": 1.0}, (0, 0, 1, 4)),
            ({"max_tokens": 100}, (0.6, 20, 0.95, 9 if chosen else 100)),
        ):
            await cluster.complete(**body)
            sent = cluster.sent.sampling
            assert (sent.temperature, sent.top_k, sent.top_p, sent.max_tokens) == expected
        listed = responses.ModelList.model_validate(await cluster.get("/v1/models"))
        assert listed.data[0].default_sampling_params == DEFAULTS | {"max_tokens": 9}
