"""The official openai client runs unchanged: chat and completions, streaming and not, and its errors."""

from typing import Any

import openai
import pytest

pytestmark = pytest.mark.all

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]


def test_chat_stream(client: openai.OpenAI, model_id: str) -> None:
    stream = client.chat.completions.create(
        model=model_id, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == "The capital of Japan is Tokyo."
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "stop"
    ]
    assert len({c.id for c in chunks}) == 1
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 8


def test_completion_stream_equals_answer(client: openai.OpenAI, model_id: str) -> None:
    request: dict[str, Any] = {"model": model_id, "prompt": "Once upon a time", "max_tokens": 8, "seed": 7}
    whole = client.completions.create(**request)
    stream = list(client.completions.create(**request, stream=True))
    assert "".join(c.choices[0].text for c in stream if c.choices) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8


def test_prompts_of_all_kinds(client: openai.OpenAI, model_id: str) -> None:
    """Several at once, token ids, echo: each is continued as when it is asked alone."""
    request: dict[str, Any] = {"model": model_id, "max_tokens": 4, "temperature": 0}
    prompts = ["1, 2, 3, 4, 5,", "Once upon a time"]
    alone = [client.completions.create(prompt=prompt, **request).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, n=2, **request)
    assert [choice.text for choice in together.choices] == [text for text in alone for _ in range(2)]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    tokenize: Any = client.post("/../tokenize", body={"prompt": prompts[0]}, cast_to=dict[str, Any])
    ids = client.completions.create(prompt=tokenize["tokens"], **request)
    assert ids.choices[0].text == alone[0]
    echoed = client.completions.create(prompt=prompts[1], echo=True, **request)
    assert echoed.choices[0].text == prompts[1] + alone[1]


def test_what_shapes_the_sampling(client: openai.OpenAI, model_id: str) -> None:
    """A bias forces a token, a penalty ends a repetition, ignore_eos goes on after the end."""
    request: dict[str, Any] = {"model": model_id, "messages": QUESTION, "temperature": 0, "seed": 1}

    def says(**more: Any) -> Any:
        return client.chat.completions.create(**request, **more)

    forced = says(logit_bias={"28": 100}, max_completion_tokens=5).choices[0]
    assert len(set(forced.message.content or "")) == 1
    assert forced.finish_reason == "length"
    punished = says(logit_bias={"28": 100}, frequency_penalty=2, presence_penalty=2, max_completion_tokens=5)
    assert punished.choices[0].message.content == forced.message.content  # 100 outweighs them
    beyond = says(max_completion_tokens=12, extra_body={"ignore_eos": True, "min_p": 0.1, "top_k": 40})
    assert beyond.usage.completion_tokens == 12
    assert beyond.choices[0].finish_reason == "length"
