"""The official OpenAI client against a real router."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.router.text.tokenizer import ModelTokenizer

from .conftest import Cluster, make_cluster

CHAT: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


async def test_models_and_errors(client: openai.AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).owned_by == "baton"
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        await client.completions.create(model="gpt-17", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as refusal:
        await client.chat.completions.create(model="fake", messages=CHAT, temperature=-1)
    assert refusal.value.param == "temperature"


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
