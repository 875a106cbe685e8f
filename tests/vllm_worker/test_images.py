"""Chats with images through vLLM workers: tokens are those of transformers, and only a worker that computes a
prompt encodes its images."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.bench.lab.harness.workers import metric
from baton.kv_names import ImageSpan
from baton.router.text.model_files import images_of
from tests.engine.conftest import IMAGE_TOKEN, TINY_QWEN3_VL, save_seeing_tokenizer, save_tiny
from tests.engine.test_images import expected_of
from tests.system.test_images import content_of, data_url

from .served import VLLMCluster, joined, routed, serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TOKENS = 60
FLAGS = (
    "--max-model-len", "512", "--advanced.block-size", "32", "--advanced.num-blocks", "100",
    "--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--advanced.max-images", "20",
)  # fmt: skip
Part = str | np.ndarray


class Seeing:
    """A tiny Qwen3-VL, and what transformers answers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rope = TINY_QWEN3_VL["rope_parameters"] | {"mrope_section": [8, 4, 4]}
        sizes = {"head_dim": 32, "rope_parameters": rope, "max_position_embeddings": 512}  # as vLLM's kernel
        self._reference = save_tiny(path, "Qwen3VL", **sizes)
        save_seeing_tokenizer(path)
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._save_processors()

    def _save_processors(self) -> None:
        """What vLLM's processor reads, and Baton does not."""
        names = {"image": "<|image_pad|>", "video": "<193>", "vision_start": "<191>", "vision_end": "<192>"}
        tokens = {f"{name}_token": token for name, token in names.items()}
        about = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
        (self.path / "tokenizer_config.json").write_text(json.dumps(about))
        file, processor = self.path / "preprocessor_config.json", {"processor_class": "Qwen3VLProcessor"}
        settings = json.loads(file.read_text())
        settings["image_std"] = [0.3, 0.25, 0.2]
        named = {"image_processor_type": "Qwen2VLImageProcessor", **processor}
        file.write_text(json.dumps(settings | named))
        named = {"video_processor_type": "Qwen3VLVideoProcessor", **processor}
        (self.path / "video_preprocessor_config.json").write_text(json.dumps(settings | named))

    def ids(self, *parts: Part) -> list[int]:
        found: list[int] = []
        for part in parts:
            if isinstance(part, str):
                found += self._tokenizer.encode(part, add_special_tokens=False).ids
            else:
                rows, columns = (round(side / 8) for side in part.shape[:2])
                found += [IMAGE_TOKEN] * (rows * columns)
        return found

    def span(self, text: str, image: np.ndarray) -> ImageSpan:
        """The place and the name of an image behind some text."""
        start, tokens = len(self.ids(text)), len(self.ids(image))
        settings = images_of(self.path)
        assert settings is not None
        file = base64.b64decode(data_url(image).partition(",")[2])
        return ImageSpan(start, start + tokens, settings.name(file))

    def tokens(self, *parts: Part, count: int = TOKENS) -> list[int]:
        shown = [part for part in parts if not isinstance(part, str)]
        return expected_of(self._reference, self.path, self.ids(*parts), shown, count)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def cluster(model: Seeing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMCluster]:
    with serving(model.path, tmp_path_factory.mktemp("served"), *FLAGS, sees=True) as served:
        yield served


def messages_of(*parts: Part) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content_of(*parts)}]


def picture(seed: int, height: int = 24, width: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(cluster: VLLMCluster) -> dict[str, int]:
    return {role: worker["status"]["images_encoded"] for role, worker in cluster.workers().items()}


def test_only_prefill_encodes(cluster: VLLMCluster, model: Seeing) -> None:
    """Two images, of which the router resizes one, in chunks that end inside an image. Then a prompt that
    begins as another, and one that differs in its image."""
    first, second, long = picture(1), picture(2, 21, 30), "Look at it and say what it is. " * 3
    before = encoded(cluster)
    cluster.ask(prompt=[5] * 300, max_tokens=2)  # which shows what text costs
    answer = cluster.chat(messages=messages_of("Look:", first, "then", second, "?"), max_tokens=TOKENS)
    assert answer["choices"][0]["token_ids"] == model.tokens("Look:", first, "then", second, "?")
    assert answer["usage"]["prompt_tokens"] == len(model.ids("Look:", first, "then", second, "?"))
    cached = []
    for image, more in ((first, ""), (first, " more"), (second, "")):
        parts = "Look:", image, long + more
        answer = cluster.chat(messages=messages_of(*parts), max_tokens=TOKENS)
        assert answer["choices"][0]["token_ids"] == model.tokens(*parts)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        ids, span = model.ids(*parts), model.span("Look:", image)
        for role in ("prefill", "decode"):
            cluster.until_cached(role, ids, 64, [span])
    assert cached == [0, 96, 0], "all that blocks of the second prompt share with the first"
    assert encoded(cluster) == {"prefill": before["prefill"] + 2, "decode": before["decode"]}
    assert cluster.workers()["prefill"]["status"]["encode_token_seconds"] > 0
    cluster.assert_whole()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stream_goes_on_when_an_engine_is_killed(cluster: VLLMCluster, model: Seeing, role: str) -> None:
    """A worker that was not killed, or was started again, gets the image another time."""
    parts = "Look:", picture(3), "then", picture(4), "?"
    right, title = model.tokens(*parts, count=200), f"{role} 0 engine::EngineCore"
    cluster.goes_on(right, title, call="chat/completions", messages=messages_of(*parts))


def test_pairs_with_batons_engine(cluster: VLLMCluster, model: Seeing) -> None:
    """Both engines take the KV of images from each other."""
    flags = ("--max-model-len", "512", "--advanced.num-blocks", "100")
    with joined(cluster, *flags) as fronts:
        for seed, front in enumerate(fronts, 5):
            parts = ("Look:", picture(seed), "Look at it and say what it is. " * 3)
            for _ in range(2):  # then with a prefix hit
                answer = front.chat(messages=messages_of(*parts), max_tokens=TOKENS)
                assert answer["choices"][0]["token_ids"] == model.tokens(*parts)
            workers = front.workers()
            counts = {role: worker["status"]["images_encoded"] for role, worker in workers.items()}
            assert counts["decode"] == 0
            front.assert_whole()


def test_a_decode_worker_alone_encodes(cluster: VLLMCluster, model: Seeing) -> None:
    """Also an image that stands in a prompt twice. It is encoded once."""
    before, image = encoded(cluster), picture(8)
    with routed(cluster, cluster.workers()["decode"]["address"]) as front:
        parts = ("Look:", image, "then", image, "?")
        answer = front.chat(messages=messages_of(*parts), max_tokens=TOKENS)
        assert answer["choices"][0]["token_ids"] == model.tokens(*parts)
        front.assert_whole()
    assert encoded(cluster) == {"prefill": before["prefill"], "decode": before["decode"] + 1}


def test_a_preempted_decode_is_computed_where_its_image_is_encoded(model: Seeing, tmp_path: Path) -> None:
    """All decodes do not fit into the blocks at their ends, and nothing is cached."""
    flags = dict(pairwise(FLAGS)) | {"--advanced.num-blocks": "40"}
    given = [word for flag in FLAGS[::2] for word in (flag, flags[flag])]
    every = [("Look:", picture(10 + i), f"at {i}") for i in range(4)]
    with (
        serving(model.path, tmp_path, *given, "--no-enable-prefix-caching", sees=True) as cluster,
        ThreadPoolExecutor(4) as pool,
    ):

        def ask(parts: tuple[Part, ...]) -> list[int]:
            answer = cluster.chat(messages=messages_of(*parts), max_tokens=400)
            return answer["choices"][0]["token_ids"]

        found = [*pool.map(ask, every)]
        assert found == [model.tokens(*parts, count=400) for parts in every]
        assert metric(cluster.url, "baton:retries_total", cause="handed_back") > 0
        assert encoded(cluster)["decode"] == 0
        cluster.assert_whole()


def test_other_tokens_than_those_of_routers_are_refused(model: Seeing, tmp_path: Path) -> None:
    more = """--enforce-eager --mm-processor-kwargs '{"max_pixels": 1024}'"""
    cluster = VLLMCluster(model.path, tmp_path, *FLAGS, "--vllm-args", more, sees=True)
    try:
        assert cluster.process.wait(200) == 1
        assert "leave out --mm-processor-kwargs of --vllm-args" in cluster.output()
    finally:
        cluster.kill()


def test_gemma_serves_text_alone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny(model, "Gemma3", head_dim=32, query_pre_attn_scalar=32)
    save_seeing_tokenizer(model, "<start_of_image>")
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in range(150, 154):  # vLLM looks for these
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["\n" * (token - 149)] = vocabulary.pop(f"<{token}>")
    file.write_text(json.dumps(tokenizer))
    tokens = {"image_token": "<|image_pad|>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (model / "tokenizer_config.json").write_text(json.dumps(about))
    settings = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
    settings |= {"size": {"height": 32, "width": 32}, "image_seq_length": 16}
    (model / "preprocessor_config.json").write_text(json.dumps(settings))
    limits = ("--max-model-len", "128", "--advanced.num-blocks", "100", "--max-num-seqs", "8")
    dummy = "--load-format", "dummy"  # vLLM does not know the names of tensors that transformers writes
    with serving(model, tmp_path, *limits, *dummy, sees=True) as cluster:
        assert len(cluster.ask(prompt=[5, 6, 7], max_tokens=4)["token_ids"]) == 4
        with pytest.raises(HTTPError) as refused:
            cluster.chat(messages=messages_of("Look:", picture(9)), max_tokens=4)
        assert refused.value.code == 400
        assert b"Gemma with --engine vllm" in refused.value.read()
