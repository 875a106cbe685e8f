"""Prompts with images: tokens equal transformers', in chunks that end inside an image, behind cached
prefixes, after preemption and after a handover."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.cluster import check_model
from baton.engine import Engine, EngineConfig, EngineRequest, Image, SpeculativeConfig, check_request
from baton.engine.core.prompt_images import PromptImages
from baton.engine.execution import runner
from baton.engine.kernels.upload import LARGE, upload
from baton.engine.loader import model_fingerprint
from baton.engine.loader.hf_config import read_config
from baton.engine.step import Pieces
from baton.vision.embeddings import Embeddings
from baton.vision.images import ImageSettings
from baton.vision.pinned_memory import PinnedMemory
from tests.device import DEVICE
from tests.engine import checkpoints
from tests.engine.checkpoints import edited_tensors
from tests.engine.conftest import IMAGE_TOKEN, request_of, run, save_tiny, tokens_of
from tests.engine.replays import capture_on_cpu, replayed_steps
from tests.engine.test_disaggregation import Pair
from tests.engine.told_device import ToldDevice

load = partial(checkpoints.load, device=DEVICE)
SIZES = [(40, 24), (16, 80), (32, 32)]  # pixels, from the top and from the left


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of Qwen3-VL, and the model of transformers."""
    path = tmp_path_factory.mktemp("qwen3-vl")
    return path, save_tiny(path, "Qwen3VL")


def settings_of(engine: Engine) -> ImageSettings:
    assert engine.model_config.vision is not None
    return engine.model_config.vision.settings


def pixels_of(seed: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompt_of(
    settings: ImageSettings, pictures: Sequence[np.ndarray], seed: int = 3
) -> tuple[list[int], tuple[Image, ...]]:
    """Some text before each image, and behind the last one."""
    rng = random.Random(seed)
    ids: list[int] = []
    images: list[Image] = []
    for picture in pictures:
        ids += [rng.randrange(3, 180) for _ in range(7)]
        rows, columns = settings.grid(*picture.shape[:2])
        data = picture.tobytes()
        images.append(Image(settings.name(data), len(ids), rows, columns, data))
        ids += [IMAGE_TOKEN] * (rows * columns)
    return [*ids, *(rng.randrange(3, 180) for _ in range(5))], tuple(images)


def request_with(
    number: int, engine: Engine, pictures: Sequence[np.ndarray], *, seed: int = 3, **sampling: Any
) -> EngineRequest:
    ids, images = prompt_of(settings_of(engine), pictures, seed)
    request = request_of(number, ids, max_tokens=10, ignore_eos=True, **sampling)
    request.images = images
    config = engine.model_config
    check_request(request, config.vocab_size, config.max_model_len, settings_of(engine))
    return request


def expected_of(
    reference: Any, path: Path, ids: Sequence[int], pictures: Sequence[np.ndarray], count: int = 10
) -> list[int]:
    """What transformers generates, with its own processor."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(path)
    inputs = processor(images=list(pictures), return_tensors="pt", input_data_format="channels_last")
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        output = reference.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=(tokens == IMAGE_TOKEN).int(),
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            max_new_tokens=count,
            eos_token_id=-1,
            do_sample=False,
        )
    return output[0, len(ids) :].tolist()


def with_more_images(
    engine: Engine, reference: Any, path: Path, pictures: Sequence[np.ndarray]
) -> tuple[list[EngineRequest], list[list[int]]]:
    """A request with the first image, one with the first two, and so on; and what transformers generates."""
    shown = [pictures[: i + 1] for i in range(len(pictures))]
    requests = [request_with(i, engine, some) for i, some in enumerate(shown)]
    return requests, [
        expected_of(reference, path, request.prompt_ids, some)
        for request, some in zip(requests, shown, strict=True)
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("budget", [5, 64])
def test_tokens_equal_transformers(seeing: tuple[Path, Any], budget: int) -> None:
    """With small chunks, most of which end inside an image, and with one chunk."""
    path, reference = seeing
    engine = load(path, num_blocks=64, max_num_batched_tokens=budget, max_num_seqs=4)
    pictures = [pixels_of(i, *size) for i, size in enumerate(SIZES)]
    requests, expected = with_more_images(engine, reference, path, pictures)
    text = request_of(9, [5, 6, 7, 8], max_tokens=10, ignore_eos=True)
    found = tokens_of(engine, [*requests, text])
    assert found[:3] == expected
    assert found[3] == tokens_of(load(path, num_blocks=64), [text])[0]
    stats = engine.stats().encoder
    assert stats is not None
    # Of six images, three are repeated.
    assert (stats.images_encoded, stats.hits, stats.images_waiting) == (3, 3, 0)
    assert stats.tokens == sum(rows * columns for rows, columns in SIZES) // 8**2
    assert stats.seconds > 0
    engine.close()


def test_an_answer_right_behind_an_image_has_the_positions_of_text_there(seeing: tuple[Path, Any]) -> None:
    """The reference computes all tokens as a prompt. `generate` of transformers counts on from the last token
    of the image, by axis: such positions no text behind an image has in a prompt."""
    path, reference = seeing
    engine = load(path, num_blocks=64)
    picture = pixels_of(0, *SIZES[0])
    request = request_with(1, engine, [picture])
    ids = request.prompt_ids = request.prompt_ids[: request.images[0].stop]
    found = tokens_of(engine, [request])[0]
    engine.close()
    inputs = Qwen2VLImageProcessorPil.from_pretrained(path)(
        images=[picture], return_tensors="pt", input_data_format="channels_last"
    )
    tokens = torch.tensor([[*ids, *found[:-1]]])
    with torch.inference_mode():
        logits = reference(
            input_ids=tokens,
            mm_token_type_ids=(tokens == IMAGE_TOKEN).int(),
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            use_cache=False,
        ).logits
    assert found == logits[0, len(ids) - 1 :].argmax(-1).tolist()


def test_an_encoder_is_timed_from_the_first_question_to_the_last_answer() -> None:
    asked: list[Future[np.ndarray]] = []

    def encode(_: Image) -> Future[np.ndarray]:
        asked.append(Future())
        return asked[-1]

    images = PromptImages([Image(bytes(32), start, 1, 1, b"") for start in (3, 5)], encode)
    assert images.computable(0, 3) == 3
    assert (images.asked_at, images.encoded_at) == (0, 0)
    assert images.computable(3, 4) == 0
    first = images.asked_at
    assert first > 0
    for future in asked:
        future.set_result(np.zeros((1, 1), dtype=np.uint8))
        assert first <= images.encoded_at
    assert images.computable(3, 4) == 4
    assert images.asked_at == first


def test_an_image_with_the_name_of_another_one_fails_its_request() -> None:
    """A step that took what is kept under the name would have too few rows."""
    kept = Future[np.ndarray]()
    kept.set_result(np.zeros((4, 1), dtype=np.uint8))
    images = PromptImages([Image(bytes(32), 3, 2, 4, b"")], lambda _: kept)
    assert images.computable(0, 20) == 3
    assert images.failure == "images[0]: another image of this name has 4 tokens"


@pytest.mark.all
def test_an_encoder_beside_decodes_gets_what_a_step_leaves(
    seeing: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = seeing
    engine = load(path, num_blocks=64, itl_target=1000.0)
    assert engine.encoder is not None
    granted: list[tuple[float, float]] = []
    grant = engine.encoder.turns.grant

    def noted(seconds: float, longest: float = 0.0) -> None:
        granted.append((seconds, longest))
        grant(seconds, longest)

    monkeypatch.setattr(engine.encoder.turns, "grant", noted)
    shown = request_with(1, engine, [pixels_of(1, 40, 24)])
    expected = tokens_of(engine, [shown])[0]
    assert granted[0][0] == math.inf  # nothing decodes
    text = request_of(2, [5, 6, 7, 8], max_tokens=60, ignore_eos=True)
    engine.add(text)
    while not any(output.id == text.id for output in engine.loop.step().outputs):
        pass
    granted.clear()
    other = request_with(3, engine, [pixels_of(2, 40, 24)])
    found = run(engine, [other])[other.id].tokens
    assert all(0 <= seconds < 1000 == longest for seconds, longest in granted[:3])
    fresh = load(path, num_blocks=64)
    assert found == tokens_of(fresh, [other])[0] != expected
    engine.close(), fresh.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("published", [False, True])
def test_experts_as_transformers_writes_them_and_as_published(published: bool, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "Qwen3VLMoe")
    with edited_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].mT if published else tensors[name]
    engine = load(tmp_path, num_blocks=64)
    pictures = [pixels_of(1, 40, 24)]
    request = request_with(1, engine, pictures)
    assert tokens_of(engine, [request])[0] == expected_of(reference, tmp_path, request.prompt_ids, pictures)
    engine.close()


@pytest.mark.all
@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_models_with_states_see(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks that end inside an image, and behind states that the prefix cache has of one."""
    monkeypatch.setattr("baton.engine.core.state_copies.END_TOKENS", 4)
    reference = save_tiny(tmp_path, kind)
    sizes = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine = load(tmp_path, enable_prefix_caching=True, **sizes)
    pictures = [pixels_of(i, *size) for i, size in enumerate(SIZES)]
    requests, expected = with_more_images(engine, reference, tmp_path, pictures)
    assert tokens_of(engine, requests) == expected
    [result] = run(engine, [request_with(7, engine, pictures)]).values()
    assert result.tokens == expected[2]
    assert result.outputs[0].cached_tokens >= requests[2].images[2].stop
    other = [pixels_of(8, *SIZES[0]), *pictures[1:]]
    [result] = run(engine, [request_with(8, engine, other)]).values()
    assert result.tokens == expected_of(reference, tmp_path, requests[2].prompt_ids, other)
    assert result.outputs[0].cached_tokens < requests[2].images[0].stop
    engine.assert_whole()
    engine.close()


def faults_of_an_encoder(path: Path, *, images: bool = True) -> list[check_model.Fault]:
    """What `baton serve --encode 1` refuses before it starts anything."""
    faults = check_model._faults(str(path), check_model.RANKS | {"encoder_pool": True}, None, images)
    return [fault for fault in faults if fault.what == "weights"]


@pytest.mark.all
def test_a_checkpoint_without_its_encoder_still_reads_text(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Qwen3_5")
    text = request_of(9, [5, 6, 7, 8], max_tokens=10, ignore_eos=True)
    engine = load(tmp_path, num_blocks=16)
    expected = tokens_of(engine, [text])
    engine.close()
    assert faults_of_an_encoder(tmp_path) == []
    with edited_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if ".visual." in name]:
            del tensors[name]
    [fault] = faults_of_an_encoder(tmp_path)
    assert fault.message == f"--model {tmp_path}: its files have no weights of an encoder of images"
    engine = load(tmp_path, num_blocks=16)
    assert engine.encoder is None
    assert tokens_of(engine, [text]) == expected
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = load(tmp_path, num_blocks=16)
    assert engine.model_config.vision is None
    assert tokens_of(engine, [text]) == expected


@pytest.mark.cases(1)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_that_could_see_may_read_text_only(
    seeing: tuple[Path, Any], tmp_path: Path, load_format: str
) -> None:
    path, _ = seeing
    text = request_of(9, [5, 6, 7, 8], max_tokens=10, ignore_eos=True)
    both = load(path, num_blocks=16, load_format=load_format)
    engine = load(path, num_blocks=16, load_format=load_format, language_model_only=True)
    assert (engine.encoder, engine.model_config.vision) == (None, None)
    assert engine.stats().encoder is None
    assert tokens_of(engine, [text]) == tokens_of(both, [text])
    assert engine.model_fingerprint != both.model_fingerprint
    both.close(), engine.close()
    save_tiny(tmp_path, "Gemma3")
    engine = load(tmp_path, num_blocks=16, language_model_only=True, max_num_batched_tokens=4, max_num_seqs=4)
    assert len(tokens_of(engine, [text])[0]) == 10  # no image needs room in a step


def test_what_is_checked_before_the_start_is_what_is_served(seeing: tuple[Path, Any], tmp_path: Path) -> None:
    """Without images such a model needs no description of its encoder."""
    path = shutil.copytree(seeing[0], tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    del config["vision_config"]
    (path / "config.json").write_text(json.dumps(config))
    [text_only, both] = (
        [fault for fault in check_model._faults(str(path), {"load_format": "auto"}, None, images)
         if fault.what == "weights"]
        for images in (False, True)
    )  # fmt: skip
    assert text_only == []
    assert "vision_config is missing" in both[0].message
    [fault] = faults_of_an_encoder(path, images=False)
    assert fault.message.startswith("--language-model-only: the model takes no images")


@pytest.mark.all
def test_new_weights_of_the_encoder(seeing: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = seeing
    after = shutil.copytree(path, tmp_path / "after")
    with edited_tensors(after) as tensors:
        for name in tensors:
            tensors[name] = tensors[name] * 1.01
    engine, fresh = load(path, num_blocks=64), load(after, num_blocks=64)
    request = request_with(1, engine, [pixels_of(1, 40, 24)])
    before = tokens_of(engine, [request])
    engine.replace_weights(engine.stage_weights(str(after)), "1")
    assert engine.encoder is not None
    assert engine.stats().encoder.kept_bytes == 0  # type: ignore[union-attr]
    assert tokens_of(engine, [request]) == tokens_of(fresh, [request])
    assert engine.encoder.encoded == 2
    engine.replace_weights(engine.stage_weights(str(path)), "2")
    assert tokens_of(engine, [request]) == before
    engine.close(), fresh.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"overlap": True}, id="steps-that-overlap"),
        pytest.param(
            {"overlap": True, "speculative_config": SpeculativeConfig(num_speculative_tokens=3)}, id="drafts"
        ),
        pytest.param({"num_blocks": 13, "block_size": 4}, id="preemption"),
    ],
)
def test_tokens_do_not_depend_on_the_way_to_them(seeing: tuple[Path, Any], config: dict[str, Any]) -> None:
    path, _ = seeing
    pictures = [pixels_of(i, 24, 24) for i in range(2)]
    one = load(path, num_blocks=64)
    # Each needs 8 blocks of 4 tokens at its end, and starts with 6.
    requests = [request_with(i, one, [picture], seed=i) for i, picture in enumerate(pictures)]
    expected = [tokens_of(one, [request])[0] for request in requests]
    engine = load(path, **{"num_blocks": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4, **config})
    assert tokens_of(engine, requests) == expected
    assert (engine.stats().preemptions > 0) == ("block_size" in config)
    one.close(), engine.close()


def test_a_cached_prefix_ends_behind_its_image_and_never_behind_another_one(seeing: tuple[Path, Any]) -> None:
    path, _ = seeing
    engine = load(path, num_blocks=64, block_size=4, enable_prefix_caching=True)
    first, other = pixels_of(1, 40, 24), pixels_of(2, 40, 24)
    request = request_with(1, engine, [first])
    expected = tokens_of(engine, [request])[0]
    assert engine.encoder is not None
    again = run(engine, [request_with(2, engine, [first])])
    [result] = again.values()
    assert result.tokens == expected
    assert result.outputs[0].cached_tokens >= request.images[0].stop
    assert (engine.encoder.encoded, engine.encoder.hits) == (1, 0)  # its tokens came from the prefix cache
    [result] = run(engine, [request_with(3, engine, [other])]).values()
    assert result.outputs[0].cached_tokens <= request.images[0].start
    fresh = load(path, num_blocks=64)
    assert result.tokens == tokens_of(fresh, [request_with(3, fresh, [other])])[0]
    assert result.tokens != expected
    # A hit that ends inside the image: the rest of it gets its embeddings again, from those that are kept.
    ids, images = prompt_of(settings_of(engine), [first])
    cut = request_of(4, ids[: images[0].stop], max_tokens=1)
    cut.images = images
    run(engine, [cut])
    assert engine.encoder.hits == 1
    engine.assert_whole()
    engine.close(), fresh.close()


def test_a_decode_engine_needs_no_pixels(seeing: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = seeing
    prefill, decode = (
        load(path, num_blocks=64, max_num_batched_tokens=16, max_num_seqs=4),
        load(path, num_blocks=64),
    )
    request = request_with(1, prefill, [pixels_of(1, 40, 24), pixels_of(2, 16, 16)])
    expected = tokens_of(decode, [request])[0]
    decode.encoder = None
    pair = Pair(prefill, decode)
    request.images = tuple(image._replace(pixels=b"") for image in request.images)
    whole = request_with(1, prefill, [pixels_of(1, 40, 24), pixels_of(2, 16, 16)])
    add = prefill.add
    monkeypatch.setattr(prefill, "add", lambda _, **how: add(whole, **how))
    assert pair.run([request])[request.id] == expected
    prefill.close(), decode.close()


def test_embeddings_of_several_images_are_uploaded_from_where_they_are() -> None:
    memory = PinnedMemory(2 * LARGE, pinned=DEVICE == "cuda")
    arrays = [memory.take(count * 1024).reshape(count, 1024) for count in (LARGE >> 10, 3)]
    for seed, array in enumerate(arrays):
        array[:] = pixels_of(seed, 1, 512).reshape(-1)[:1024]
    pieces = Pieces([arrays[0][5:], arrays[1][:2], arrays[0][:5]])
    rows, found, none = upload([np.arange(7), pieces, np.zeros((0, 3), np.int64)], torch.device(DEVICE))
    assert (rows.tolist(), none.shape) == ([*range(7)], (0, 3))
    assert found.shape == pieces.shape
    np.testing.assert_array_equal(found.cpu().numpy(), np.asarray(pieces))


def test_ranks_share_what_one_of_them_encodes(seeing: tuple[Path, Any], ranks: Callable[..., Engine]) -> None:
    path, _ = seeing
    engine = ranks(path, 2, max_num_batched_tokens=16, max_num_seqs=4)
    request = request_with(1, engine, [pixels_of(1, 40, 24)])
    one = load(path, num_blocks=64, device="cpu")  # as the ranks
    assert tokens_of(engine, [request]) == tokens_of(one, [request])
    one.close()


def test_an_image_that_cannot_be_encoded_fails_its_request_alone(seeing: tuple[Path, Any]) -> None:
    path, _ = seeing
    engine = load(path, num_blocks=64)
    lacking = request_with(1, engine, [pixels_of(1, 40, 24)])
    lacking.images = tuple(image._replace(pixels=b"") for image in lacking.images)
    text = request_of(2, [5, 6, 7], max_tokens=3, ignore_eos=True)
    results = run(engine, [lacking, text])
    assert "images[0]: the pixels of an image are missing" in (results[lacking.id].failed or "")
    assert len(results[text.id].tokens) == 3
    engine.assert_whole()
    engine.close()


def test_images_that_do_not_fit_their_prompt_are_refused(seeing: tuple[Path, Any]) -> None:
    path, _ = seeing
    settings = read_config(path).vision
    assert settings is not None
    ids, (image,) = prompt_of(settings.settings, [pixels_of(1, 40, 24)])
    request = request_of(1, ids, max_tokens=10)
    for images, message in (
        ((image._replace(name=b"short"),), "its name must have 32 bytes"),
        ((image._replace(start=len(ids) - 3),), "are not in the prompt"),
        ((image, image), "not behind those of the image before"),
        ((image._replace(start=image.start - 1),), "its tokens must all be 190"),
        ((image._replace(pixels=image.pixels[1:]),), "2879 bytes of pixels, not 2880"),
        ((image._replace(rows=0),), "0 × 3 tokens"),
    ):
        request.images = images
        with pytest.raises(ValueError, match=re.escape(message)):
            check_request(request, 199, 256, settings.settings)
    with pytest.raises(ValueError, match="this worker takes none"):
        check_request(request, 199, 256)


def test_the_fingerprint_covers_the_encoder(seeing: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = seeing
    copy = shutil.copytree(path, tmp_path / "copy")
    before = model_fingerprint(EngineConfig(str(path)), 256)
    engine = load(path)
    assert engine.model_fingerprint == before
    engine.close()
    with edited_tensors(copy) as tensors:
        tensors["model.visual.patch_embed.proj.bias"] += 1
    assert model_fingerprint(EngineConfig(str(copy)), 256) != before


class ComesLater(Embeddings):
    """Embeddings that come when the test says so."""

    def _start(
        self, name: bytes, pixels: bytes, rows: int, columns: int, tenant: bytes
    ) -> "Future[np.ndarray]":
        self.asked: Future[np.ndarray] = Future()
        return self.asked


def test_an_image_that_is_ready_wakes_an_engine_beside_a_step(seeing: tuple[Path, Any]) -> None:
    """While it waits for the image, the engine blocks in no step: messages may come."""
    engine = load(seeing[0], num_blocks=64, overlap=True)
    encoder, later = engine.encoder, ComesLater()
    assert encoder is not None
    engine._images = later
    picture = pixels_of(0, *SIZES[0])
    request = request_with(1, engine, [picture])
    [image] = request.images
    found = encoder.embeddings(image.name, image.pixels, image.rows, image.columns).result()
    device = ToldDevice(engine)
    engine.add(request)
    engine.loop.step()
    assert len(engine.loop.under_way) == 1, "the text before the image"
    assert engine.loop.seconds_to_step == math.inf
    assert not device.woken()
    later.asked.set_result(found)
    assert device.woken()
    assert engine.loop.seconds_to_step < math.inf
    engine.loop.step()
    assert len(engine.loop.under_way) == 2, "the rest of the prompt follows at once"
    device.finish()
    engine.close()


@pytest.mark.gpu
def test_graphs_replay_the_encoder(seeing: tuple[Path, Any]) -> None:
    """Images of one size: graphs are captured beside steps of the engine."""
    path, reference = seeing
    engine = load(path, num_blocks=128, max_num_seqs=8)
    pictures = [pixels_of(i, *SIZES[i % 2]) for i in range(6)]
    requests = [request_with(i, engine, [picture]) for i, picture in enumerate(pictures)]
    for request, tokens, picture in zip(requests, tokens_of(engine, requests), pictures, strict=True):
        assert tokens == expected_of(reference, path, request.prompt_ids, [picture])
    engine.close()


@pytest.mark.all
@pytest.mark.skipif(DEVICE == "cuda", reason="captures on a CPU; other tests replay real graphs there")
def test_graphs_replay_steps_with_images(seeing: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with images and text, beside decodes, and chunks that end inside an image."""
    make = partial(load, seeing[0], num_blocks=128, max_num_seqs=8)
    plain, engine = make(), make(max_num_batched_tokens=24, enable_prefix_caching=True)
    shown = [[pixels_of(i + j, *SIZES[(i + j) % 3]) for j in range(i % 3)] for i in range(6)]
    requests = [request_with(i, engine, pictures, seed=i) for i, pictures in enumerate(shown)]
    expected = tokens_of(plain, requests)
    capture_on_cpu(engine, monkeypatch)
    monkeypatch.setattr(runner, "upload", lambda *_: pytest.fail("a step is launched kernel by kernel"))
    for _ in range(2):  # then behind cached prefixes
        assert tokens_of(engine, requests) == expected
    assert all(replayed_steps(engine).values())
    for each in (plain, engine):
        each.close()


def test_memory_is_released_when_the_encoder_computes_nothing(seeing: tuple[Path, Any]) -> None:
    engine = load(seeing[0], num_blocks=None, enable_memory_saver=True)
    encoder = engine.encoder
    assert encoder is not None
    waiting, seen = list[Future[np.ndarray]](), list[bool]()
    encoder._give_back = lambda: seen.append(all(each.done() for each in waiting))
    picture = pixels_of(0, *SIZES[0])
    _, [image] = prompt_of(settings_of(engine), [picture])
    waiting.append(encoder.embeddings(image.name, image.pixels, image.rows, image.columns))
    engine.loop.frozen = True
    engine.memory.release(["kv_cache"])
    assert seen == [True]
    engine.close()


def test_the_weights_of_the_encoder_are_released_and_replaced_with_the_others(
    seeing: tuple[Path, Any],
) -> None:
    fresh, engine = load(seeing[0]), load(seeing[0], enable_memory_saver=True)
    asked = request_with(1, fresh, [pixels_of(1, 40, 24)])
    right = tokens_of(fresh, [asked])
    engine.loop.frozen = True
    engine.memory.release(["weights"])
    engine.memory.resume(["weights"])
    assert not any(weight.any() for weight in engine.loaded.tower.values())
    engine.replace_weights(engine.stage_weights(str(seeing[0])), "1")
    engine.loop.frozen = False
    assert tokens_of(engine, [asked]) == right
    for each in (fresh, engine):
        each.close()
