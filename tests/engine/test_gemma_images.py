"""Gemma 3 and 4 with images: tokens equal transformers', where tokens of an image see all of it."""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from baton.engine import Engine, Image
from baton.engine.core.prompt_images import PromptImages
from tests.device import DEVICE
from tests.engine import checkpoints
from tests.engine.checkpoints import edited_tensors
from tests.engine.conftest import IMAGE_TOKEN, request_of, run, save_tiny, tokens_of
from tests.engine.test_images import pixels_of, request_with

load = partial(checkpoints.load, device=DEVICE, block_size=4, max_num_seqs=4)
GEMMA3 = (32, 32)
KINDS = {
    "gemma3": ("Gemma3", {}),
    "gemma3-windows-below-an-image": ("Gemma3", {"sliding_window": 10}),
    "gemma4": ("Gemma4", {"use_bidirectional_attention": "vision", "sliding_window": 10}),
    "gemma4-causal": ("Gemma4", {}),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A checkpoint of a kind, and the model of transformers."""
    made: dict[str, tuple[Path, Any]] = {}

    def of(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            path, (name, changes) = tmp_path_factory.mktemp(kind), KINDS[kind]
            made[kind] = path, save_tiny(path, name, **changes)
            if name == "Gemma4":
                tokens = {"image_processor": {"max_soft_tokens": 20}}
                (path / "processor_config.json").write_text(json.dumps(tokens))
        return made[kind]

    return of


def pictures_of(kind: str) -> list[np.ndarray]:
    sizes = [GEMMA3] * 3 if kind.startswith("gemma3") else [(32, 24), (16, 72), (32, 40)]
    return [pixels_of(i, *size) for i, size in enumerate(sizes)]


def expected_of(
    reference: Any, ids: Sequence[int], pictures: Sequence[np.ndarray], count: int = 10
) -> list[int]:
    """What transformers generates, with its own processor."""
    tokens = torch.tensor([ids])
    types = (tokens == IMAGE_TOKEN).int()
    images = [np.ascontiguousarray(picture.transpose(2, 0, 1)) for picture in pictures]
    given: dict[str, Any] = {}
    if reference.config.model_type == "gemma3":
        processor = Gemma3ImageProcessorPil(size={"height": GEMMA3[0], "width": GEMMA3[1]})
        given = {**processor(images=images, return_tensors="pt"), "token_type_ids": types}
        del given["num_crops"]
    else:
        processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, do_resize=False)
        given = {**processor(images=images, return_tensors="pt"), "mm_token_type_ids": types}
        del given["num_soft_tokens_per_image"]
    with torch.inference_mode():
        output = reference.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **given,
            max_new_tokens=count,
            eos_token_id=-1,
            do_sample=False,
        )
    return output[0, len(ids) :].tolist()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "model_impl"), [*((kind, "auto") for kind in KINDS), ("gemma3", "transformers")]
)
def test_tokens_equal_transformers(
    seeing: Callable[[str], tuple[Path, Any]], kind: str, model_impl: str
) -> None:
    """With chunks that text and images would fill and cut."""
    path, reference = seeing(kind)
    engine = load(path, num_blocks=64, max_num_batched_tokens=24, model_impl=model_impl)
    pictures = pictures_of(kind)
    requests = [request_with(i, engine, pictures[: i + 1]) for i in (0, 2)]
    text = request_of(9, [5, 6, 7, 8], max_tokens=10, ignore_eos=True)
    found = tokens_of(engine, [*requests, text])
    for request, tokens, count in zip(requests, found, (1, 3), strict=False):
        assert tokens == expected_of(reference, request.prompt_ids, pictures[:count])
    assert found[2] == tokens_of(engine, [text])[0]
    engine.close()


def test_a_chunk_has_whole_images() -> None:
    ready: Future[np.ndarray] = Future()
    ready.set_result(np.zeros((16, 4), np.uint8))
    images = PromptImages(
        [Image(bytes(32), start, 4, 4, b"") for start in (5, 30)],
        lambda _: ready,
        grid=False,
        sees_whole=True,
    )
    assert images.computable(0, 60) == 60
    for (start, count, most), expected in {
        (0, 5, 9): 5,  # text
        (0, 9, 9): 5,  # text, since the image behind it would be cut
        (0, 21, 21): 21,
        (5, 9, 16): 16,  # the image takes what the step has beyond its limit
        (5, 9, 15): 0,
        (8, 9, 13): 13,  # behind a part that the prefix cache has
        (5, 30, 99): 25,
        (30, 16, 16): 16,
        (46, 3, 3): 3,
        (5, 0, 16): 0,
    }.items():
        assert images.chunk(start, count, most) == expected, (start, count, most)
    assert images.shift(np.arange(60)) is None
    [one] = images.inputs(range(30))
    assert one.seen_whole.tolist() == [[0, 5, 21]]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["gemma3-windows-below-an-image", "gemma4"])
def test_a_prefix_ends_behind_an_image_or_inside_it(
    seeing: Callable[[str], tuple[Path, Any]], kind: str
) -> None:
    path, reference = seeing(kind)
    engine = load(path, num_blocks=64, enable_prefix_caching=True, max_num_batched_tokens=24)
    first, *_ = pictures_of(kind)
    request = request_with(1, engine, [first])
    expected = expected_of(reference, request.prompt_ids, [first])
    inside = request.images[0].start + 9
    cut = request_of(2, request.prompt_ids[: request.images[0].stop], max_tokens=1)
    cut.images = request.images
    run(engine, [cut])
    assert tokens_of(engine, [request])[0] == expected  # the prefix ends with its last whole block
    [result] = run(engine, [request_with(3, engine, [first])]).values()
    assert result.tokens == expected
    assert result.outputs[0].cached_tokens >= request.images[0].stop > inside
    others = (pixels_of(seed, *first.shape[:2]) for seed in range(8, 40))
    other = next(x for x in others if expected_of(reference, request.prompt_ids, [x]) != expected)
    changed = request_with(4, engine, [other])
    [result] = run(engine, [changed]).values()
    assert result.outputs[0].cached_tokens <= request.images[0].start
    assert result.tokens == expected_of(reference, changed.prompt_ids, [other]) != expected
    engine.assert_whole()
    engine.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "config", [{"num_blocks": 15}, {"overlap": True}, {"batch_invariant": True}], ids=str
)
def test_tokens_do_not_depend_on_the_way_to_them(
    seeing: Callable[[str], tuple[Path, Any]], config: dict[str, Any]
) -> None:
    """After preemption, in steps that overlap, and in the exact mode."""
    path, reference = seeing("gemma3")
    rounded = DEVICE == "cuda" and "batch_invariant" in config  # there is no exact product in float32 there
    dtype = {"dtype": "bfloat16"} if rounded else {}
    engine = load(path, **{"num_blocks": 64, "max_num_batched_tokens": 20, **config, **dtype})
    pictures = pictures_of("gemma3")
    first, second = (
        [request_with(10 * turn + i, engine, [picture], seed=i) for i, picture in enumerate(pictures[:2])]
        for turn in range(2)
    )
    assert tokens_of(engine, first) == [
        tokens_of(engine, [request])[0] if rounded else expected_of(reference, request.prompt_ids, [picture])
        for request, picture in zip(second, pictures, strict=False)
    ]
    assert (engine.stats().preemptions > 0) == ("num_blocks" in config)
    engine.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_ranks_see_whole_images(
    seeing: Callable[[str], tuple[Path, Any]], ranks: Callable[..., Engine], kind: str
) -> None:
    path, reference = seeing(kind)
    engine = ranks(path, 2, max_num_batched_tokens=24, max_num_seqs=4)
    pictures = pictures_of(kind)[:1]
    request = request_with(1, engine, pictures)
    assert tokens_of(engine, [request])[0] == expected_of(reference, request.prompt_ids, pictures)


def test_a_step_must_have_room_for_an_image(seeing: Callable[[str], tuple[Path, Any]]) -> None:
    path, _ = seeing("gemma3")
    with pytest.raises(
        ValueError, match="--max-num-batched-tokens 18: a step must have room for a whole image"
    ):
        load(path, num_blocks=64, max_num_batched_tokens=18)


def test_an_image_of_another_grid_is_refused(seeing: Callable[[str], tuple[Path, Any]]) -> None:
    path, _ = seeing("gemma3")
    engine = load(path, num_blocks=16)
    with pytest.raises(ValueError, match="the model takes no image of 2 × 8 tokens"):
        request_with(1, engine, [pixels_of(1, 16, 64)])
    engine.close()


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_a_checkpoint_without_its_encoder_still_reads_text(
    seeing: Callable[[str], tuple[Path, Any]], kind: str, tmp_path: Path
) -> None:
    path = shutil.copytree(seeing(kind)[0], tmp_path / "text")
    text = request_of(9, [5, 6, 7, 8], max_tokens=4, ignore_eos=True)
    with edited_tensors(path) as tensors:
        for name in [name for name in tensors if "vision" in name or "multi_modal" in name]:
            del tensors[name]
    engine = load(path, num_blocks=16)
    assert engine.encoder is None
    assert len(tokens_of(engine, [text])[0]) == 4
