"""Chats with images in a cluster: their tokens are transformers', also after a worker was killed."""

import asyncio
import base64
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import openai
import PIL.Image
import pytest
from tokenizers import Tokenizer

from baton.bench.lab.harness.cluster import LocalCluster, leaks_when_idle
from tests.engine.conftest import IMAGE_TOKEN, save_seeing_tokenizer, save_tiny
from tests.engine.test_gemma_images import GEMMA3
from tests.engine.test_gemma_images import expected_of as expected_of_gemma
from tests.engine.test_images import expected_of
from tests.within import WITHIN

from .recovery import FLAGS, retries

pytestmark = pytest.mark.long


def data_url(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def content_of(*parts: str | np.ndarray) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]


TOKENS = 60


@pytest.mark.parametrize(
    ("kind", "killed", "encoders"),
    [
        ("Qwen3VL", "", 0),
        ("Qwen3VL", "prefill", 0),
        ("Qwen3VL", "decode", 0),
        ("Gemma3", "prefill", 0),
        ("Gemma3", "decode", 0),
        ("Qwen3VL", "", 1),
        ("Qwen3VL", "prefill", 1),
        ("Qwen3VL", "decode", 1),
        ("Gemma3", "decode", 1),
        ("Qwen2_5_VL", "decode", 0),
        ("Qwen2_5_VL", "prefill", 1),
    ],
)
async def test_a_client_reads_the_tokens_of_transformers(
    kind: str, killed: str, encoders: int, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    reference = save_tiny(model, kind)
    gemma = kind == "Gemma3"
    save_seeing_tokenizer(model, "<start_of_image>" if gemma else "<|image_pad|>")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rng = np.random.default_rng(5)
    # 21 × 30 pixels become 24 × 32.
    sizes = [GEMMA3, GEMMA3] if gemma else [(24, 40), (21, 30)]
    pictures = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    around = tokenizer.encode("\n\n", add_special_tokens=False).ids if gemma else []
    named = ["--model", str(model), "--served-model-name", "vl"]
    room = ["--max-num-seqs", "16"]  # beside an image in a step
    with LocalCluster(
        tmp_path,
        prefill=1,
        decode=1,
        encode=encoders,
        worker_flags=[*FLAGS, *room, *named],
        router_flags=["--advanced.no-overflow", *named],
    ) as cluster:
        async with openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as client:

            async def ask(*parts: str | np.ndarray, kill: str = "") -> None:
                messages: Any = [{"role": "user", "content": content_of(*parts)}]
                stream = await client.chat.completions.create(
                    model="vl",
                    messages=messages,
                    max_tokens=TOKENS,
                    temperature=0.0,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                found: list[int] = []
                usage = None
                async for chunk in stream:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        found += (choice.model_extra or {}).get("token_ids") or []
                    if kill and len(found) > 3:
                        cluster.of(kill)[0].kill("engine")
                        kill = ""
                ids: list[int] = []
                for part in parts:
                    if isinstance(part, str):
                        ids += tokenizer.encode(part, add_special_tokens=False).ids
                    else:
                        rows, columns = (round(side / 8) for side in part.shape[:2])
                        of_image = [IMAGE_TOKEN] * (rows * columns)
                        if gemma:
                            of_image = [*around, IMAGE_TOKEN + 1, *of_image, IMAGE_TOKEN + 2, *around]
                        ids += of_image
                assert usage is not None
                assert usage.prompt_tokens == len(ids)
                shown = [part for part in parts if not isinstance(part, str)]
                if gemma:
                    assert found == expected_of_gemma(reference, ids, shown, TOKENS)
                else:
                    assert found == expected_of(reference, model, ids, shown, TOKENS)

            lost = False
            while not lost:  # on a busy machine the answer may end before the kill
                before = retries(cluster.url)
                await ask("Look:", pictures[0], "then", pictures[1], "which?", kill=killed)
                lost = killed != "decode" or retries(cluster.url) > before
            await ask("Look:", pictures[1], "then", pictures[1], "which?")
            wrong: Any = [{"role": "user", "content": content_of(pictures[0])}]
            wrong[0]["content"][0]["image_url"]["url"] = "data:image/png;base64,AAAA"
            with pytest.raises(openai.BadRequestError, match="image 0 cannot be decoded: it is none of PNG"):
                await client.chat.completions.create(model="vl", messages=wrong)
            for encoder in cluster.of("encode"):
                # Each picture once, though requests repeat them and workers were killed.
                assert encoder.metric("baton:images_encoded_total") == len(pictures)
        assert leaks_when_idle(cluster.url) == {}


def answer_of(model: Path, picture: np.ndarray) -> list[int]:
    """The tokens of transformers for `ask_about`. Saves the model."""
    reference = save_tiny(model, "Qwen3VL")
    save_seeing_tokenizer(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    before, after = (tokenizer.encode(part, add_special_tokens=False).ids for part in ("Look:", "which?"))
    return expected_of(reference, model, [*before, *[IMAGE_TOKEN] * 15, *after], [picture], TOKENS)


async def ask_about(client: openai.AsyncOpenAI, picture: np.ndarray) -> list[int]:
    messages: Any = [{"role": "user", "content": content_of("Look:", picture, "which?")}]
    answer = await client.chat.completions.create(
        model="vl",
        messages=messages,
        max_tokens=TOKENS,
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    [choice] = answer.choices
    return (choice.model_extra or {})["token_ids"]


async def test_an_encoder_is_killed_while_a_request_waits_for_its_image(tmp_path: Path) -> None:
    model = tmp_path / "model"
    picture = np.random.default_rng(6).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    expected = answer_of(model, picture)
    named = ["--model", str(model), "--served-model-name", "vl"]
    with LocalCluster(
        tmp_path, prefill=1, decode=1, encode=1, worker_flags=[*FLAGS, *named], router_flags=named
    ) as cluster:
        [encoder] = cluster.of("encode")
        encoder.hang("engine")
        async with openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as client:
            asked = asyncio.create_task(ask_about(client, picture))
            text: Any = [{"role": "user", "content": "Look"}]
            # Requests without images need no encoder.
            await client.chat.completions.create(model="vl", messages=text, max_tokens=3)
            assert not asked.done()
            encoder.kill("engine")
            assert await asked == expected
            assert len(encoder.lives) == 2
        assert leaks_when_idle(cluster.url) == {}


async def test_an_engine_asks_for_an_image_that_the_one_before_it_had(tmp_path: Path) -> None:
    """A router sends pixels once, since workers keep embeddings by name."""
    model = tmp_path / "model"
    picture = np.random.default_rng(6).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    expected = answer_of(model, picture)
    named = ["--model", str(model), "--served-model-name", "vl"]
    flags = [*FLAGS, *named, "--replace-engine", "--advanced.no-standby"]
    with LocalCluster(
        tmp_path, prefill=1, decode=1, worker_flags=flags, router_flags=["--advanced.no-overflow", *named]
    ) as cluster:
        [worker] = cluster.of("prefill")

        def encoded(count: int) -> None:
            end = time.monotonic() + WITHIN
            while worker.metric("baton:images_encoded_total") != count:  # it is at most a second old
                assert time.monotonic() < end
                time.sleep(0.1)

        async with openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as client:
            for life in range(3):
                assert await ask_about(client, picture) == expected
                if life == 1:
                    await asyncio.to_thread(encoded, 1)
                    worker.kill("engine")
            await asyncio.to_thread(encoded, 2)
        assert leaks_when_idle(cluster.url) == {}
