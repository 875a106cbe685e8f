"""Where tokens are in a text, and where an output ends."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from baton.router.text.tokenizer import load_tokenizer
from baton.rpc.token_ids import unpacked_ids
from tests.reports.replay import BURSTS, replaying, say, write_model
from tests.router.conftest import Cluster, make_cluster

COMPLETION = "/v1/completions"
WORDS = ("▁Hello", "▁world")


def sentencepiece(decoder: Any, normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    """Llama 2's kind of tokenizer, with few words."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Helowrd", "Ġ"]
    vocabulary, merges = {name: i for i, name in enumerate(names)}, []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocabulary.setdefault(word[:end], len(vocabulary))
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.decoder = decoder
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.add_special_tokens([AddedToken(t, normalized=False) for t in names[:3]])
    made.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 1)])
    return made


def steps(*more: Any) -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def byte_level(at: Path, *, trim: bool) -> Tokenizer:
    made = Tokenizer.from_file(str(write_model(at) / "tokenizer.json"))
    made.post_processor = processors.ByteLevel(trim_offsets=trim)
    return made


UNDERSCORES = normalizers.Replace(" ", "▁")
TOKENIZERS: dict[str, Any] = {
    "Llama 2": lambda at: sentencepiece(
        steps(decoders.Strip(" ", 1, 0)), normalizers.Sequence([normalizers.Prepend("▁"), UNDERSCORES])
    ),
    "Gemma": lambda at: sentencepiece(steps(), UNDERSCORES),
    "Metaspace": lambda at: sentencepiece(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]),
        None,
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    ),
    "Metaspace that adds none": lambda at: sentencepiece(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
        None,
        pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
    ),
    "bytes": lambda at: byte_level(at, trim=False),
    "bytes without the space before them": lambda at: byte_level(at, trim=True),
}
TEXTS = ("Hello world", "world Hello", " Hello", "He 🙂🙂 é world", "<s>Hello world")


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", TOKENIZERS)
async def test_texts_of_tokens(kind: str, tmp_path: Path):
    """As in transformers and vLLM. A `text_offset` is a place in the text."""
    made = TOKENIZERS[kind](tmp_path / "bytes")
    model = write_model(tmp_path / "model", "{{ messages[0].content }}")
    made.save(str(model / "tokenizer.json"))
    async with make_cluster(load_tokenizer(str(model)), tmp_path, text="Hello") as cluster:
        for text in TEXTS:
            ids = made.encode(text, add_special_tokens=False).ids
            status, answer = await cluster.post("/detokenize", tokens=ids)
            assert (status, answer["prompt"]) == (200, made.decode(ids, skip_special_tokens=False))
            for prompt in (text, ids):
                await check_offsets(cluster, prompt, text if prompt is text else answer["prompt"])


async def test_offsets_of_a_prompt_that_is_cut(tmp_path: Path):
    model = write_model(tmp_path / "model")
    TOKENIZERS["Llama 2"](tmp_path).save(str(model / "tokenizer.json"))
    text = "Hello world world world"
    async with make_cluster(load_tokenizer(str(model)), tmp_path, text="Hello") as cluster:
        for side, offsets in (("left", [11, 17]), ("right", [0, 0])):  # BOS is the first token
            cut = {"truncate_prompt_tokens": 2, "truncation_side": side}
            [choice] = (await cluster.complete(prompt=text, echo=True, logprobs=0, max_tokens=1, **cut))[
                "choices"
            ]
            assert choice["logprobs"]["text_offset"] == [*offsets, len(text)], side


async def test_a_text_may_be_bos_alone(tmp_path: Path):
    """Harnesses ask for the probability of a text without anything before it."""
    model = write_model(tmp_path / "model")
    TOKENIZERS["Llama 2"](tmp_path).save(str(model / "tokenizer.json"))
    async with make_cluster(load_tokenizer(str(model)), tmp_path, text="Hello") as cluster:
        await cluster.complete(prompt=["", "Hello"])
        assert {
            unpacked_ids(message.prefill.request.prompt_ids)[0] for message in cluster.prefills[0].submitted
        } == {1}
        await cluster.complete(prompt="")
        assert list(unpacked_ids(cluster.sent.prompt_ids)) == [1]
        status, answer = await cluster.post(COMPLETION, prompt="", add_special_tokens=False)
        assert (status, answer["error"]["param"]) == (400, "prompt")


async def check_offsets(cluster: Cluster, prompt: str | list[int], echo: str) -> None:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 20, "logprobs": 1}
    for text in (" world 🙂 é Hello", "Hello"):
        say(cluster, text)
        for echoed in (echo, ""):
            more = {"echo": bool(echoed)}
            [choice] = (await cluster.complete(**body, **more))["choices"]
            tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert offsets == sorted(offsets)
            whole = choice["text"] + "\N{REPLACEMENT CHARACTER}"
            for token, start in zip(tokens, offsets, strict=True):
                if "\N{REPLACEMENT CHARACTER}" not in token and token not in ("<s>", "</s>", "<|im_end|>"):
                    assert whole.startswith(token, start), (echo, token, start)
            chunks = await cluster.events(COMPLETION, **body, **more)
            streamed = [each for chunk in chunks for each in chunk["choices"][0]["logprobs"]["text_offset"]]
            assert streamed == offsets


STOPS: list[tuple[int, list[str], str]] = [
    (0, ["lo"], "Hel"),
    (2, ["lo"], "Hel"),
    (4, ["lo"], "Hel"),  # it ends after four tokens, though it begins before
    (5, ["lo"], "Hello world hel"),
    (9, ["world"], "Hello "),
    (5, ["ello", "o w"], "Hell"),
    (0, ["x"], "Hello world hello wor"),
]
"""`min_tokens`, stop strings, and the text of an answer "Hello world hello world" of 21 tokens."""


async def test_stop_strings_that_end_after_min_tokens(tmp_path: Path):
    async with replaying(tmp_path) as made:
        for burst in BURSTS:
            say(made, "Hello world hello world", burst)
            for least, stops, text in STOPS:
                body = {"prompt": "Hi", "max_tokens": 21, "min_tokens": least, "stop": stops}
                [choice] = (await made.complete(**body))["choices"]
                chunks = await made.events(COMPLETION, **body)
                streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                assert choice["text"] == streamed == text, (least, stops)
