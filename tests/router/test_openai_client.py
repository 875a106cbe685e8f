"""The official OpenAI client against a real router."""

from pathlib import Path
from typing import Any

import openai
import pytest

from baton.router.text.tokenizer import ModelTokenizer

from .conftest import make_cluster

CHAT: list[Any] = [{"role": "user", "content": "Hi"}]


async def test_a_model_has_several_names(tokenizer: ModelTokenizer, tmp_path: Path):
    async with (
        make_cluster(tokenizer, tmp_path, served_model_name=("fake", "gpt-4o")) as cluster,
        openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none") as api,
    ):
        assert [model.id async for model in api.models.list()] == ["fake", "gpt-4o"]
        assert (await api.models.retrieve("gpt-4o")).id == "gpt-4o"
        for name in ("fake", "gpt-4o"):
            completion = await api.completions.create(model=name, prompt="Hello", max_tokens=2)
            assert completion.model == "fake", "responses have the first name"
        with pytest.raises(openai.NotFoundError, match="no model 'other' here: give 'fake' or 'gpt-4o'"):
            await api.completions.create(model="other", prompt="Hello")
