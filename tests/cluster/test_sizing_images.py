import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.bench.lab.shapes import write_shape
from baton.cluster.cli import app
from baton.cluster.options.clients import SizingOptions
from baton.cluster.tools.sizing.answer import Targets
from baton.cluster.tools.sizing.images import Choice, Images, choose, encoded_within, estimated, images_of
from baton.cluster.tools.sizing.speeds import H200, REFERENCE, Speeds, opened
from baton.engine.model_config import ModelConfig, VisionConfig
from tests.vision.towers import SETTINGS, TOWERS

from .test_sizing import few_requests  # noqa: F401  a fixture

SPEEDS = Speeds(H200, REFERENCE)
LOAD = SizingOptions(rate=4, input_len=2000, output_len=150, images=4)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape("qwen3-vl-8b", tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def model(seeing: Path) -> ModelConfig:
    return opened(str(seeing)).config


@pytest.mark.all
def test_tokens_and_time_of_an_image(model: ModelConfig) -> None:
    speeds = Speeds(H200, model)
    found = images_of(LOAD, model, speeds)
    assert found is not None
    assert (found.count, found.tokens, found.measured) == (4, 34 * 60, False)
    assert 0.01 < found.seconds < 0.1
    small = images_of(replace(LOAD, image_size="960x540"), model, speeds)
    assert small is not None
    assert small.tokens == 17 * 30
    assert small.seconds < found.seconds / 4, "attention of an image takes the square"
    known = Speeds(replace(H200, encode_token_seconds=1e-4), model)
    assert images_of(LOAD, model, known) == Images(4, 2040, 1e-4 * 2040, measured=True)
    assert images_of(replace(LOAD, images=0), model, speeds) is None


@pytest.mark.parametrize("kind", TOWERS)
def test_each_kind_of_encoder_has_an_estimate(kind: str) -> None:
    vision = VisionConfig(SETTINGS, json.dumps(TOWERS[kind]))
    small, large = (estimated(vision, tokens, SPEEDS) for tokens in (64, 256))
    assert 0 < small < large / 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_size": "big"}, "--advanced.image-size big"),
        ({"image_size": "0x9"}, "--advanced.image-size 0x9"),
        ({"image_size": "20000x10"}, "too narrow"),
        ({"agents": 4}, "agents send none"),
    ],
)
def test_impossible_images_are_refused(model: ModelConfig, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        images_of(replace(LOAD, **changes), model, SPEEDS)


def test_a_model_without_an_encoder_takes_no_images() -> None:
    with pytest.raises(ValueError, match="takes no images"):
        images_of(LOAD, REFERENCE, SPEEDS)


def test_the_wait_for_images() -> None:
    """Alone, and with as much to do as the encoders can."""
    images = Images(4, 100, 0.1, measured=True)
    assert encoded_within(images, 1e-6, 1) == pytest.approx(0.4)
    assert encoded_within(images, 1e-6, 3) == pytest.approx(0.2)
    assert encoded_within(images, 1e-6, 8) == pytest.approx(0.1)
    assert encoded_within(images, 2.4, 1) > 1 > encoded_within(images, 2.4, 2)


def chosen(images: Images, rate: float = 1, output: int = 20) -> Choice:
    load = replace(LOAD, rate=rate, output_len=output, input_len=200 + images.count * images.tokens)
    return choose(SPEEDS, SPEEDS, load, Targets(ttft=0.5, itl=0.05), images)


def test_a_pool_does_not_pay_with_few_images() -> None:
    found = chosen(Images(1, 500, 0.02, measured=True))
    assert found.encoders == 0
    assert found.why.endswith(
        "does not pay: workers that encode need 2 GPUs, and no fewer are enough with a pool"
    )


@pytest.mark.all
def test_a_pool_pays_where_workers_cannot_encode_in_time() -> None:
    found = chosen(Images(20, 30, 0.3, measured=True))
    assert found.encoders >= 20, "each image of a request has one"
    assert "a pool of their own pays: else --slo ttft=500" in found.why
    with pytest.raises(ValueError, match="--slo ttft"):
        chosen(Images(1, 30, 8.0, measured=True))


@pytest.mark.long
@pytest.mark.parametrize("rate", [3, 4])
def test_a_pool_pays_where_images_take_long(rate: int) -> None:
    """Decode workers of a cluster that encodes are many, since each computes prompts, too. With a pool one
    is enough."""
    found = chosen(Images(8, 30, 0.05, measured=True), rate=rate, output=150)
    assert found.encoders >= 4
    assert found.answer.pools == (1, 1)
    assert " with workers that encode" in found.why


@pytest.mark.all
def test_the_command(seeing: Path) -> None:
    flags = ["plan", "--model", str(seeing), "--rate", "2", "--advanced.images", "1", "--input-len", "200"]
    printed = CliRunner().invoke(app, flags)
    assert printed.exit_code == 0, printed.output
    assert (
        "An image of 1920x1080: 2,040 tokens, 46.7 ms of an encoder (estimated from its size)"
        in printed.output
    )
    assert "Encoders: a pool of their own does not pay" in printed.output
    predicted = CliRunner().invoke(app, [*flags, "--prefill", "1", "--decode", "1"])
    without = CliRunner().invoke(app, [*flags[:-4], "--input-len", "2240", "--prefill", "1", "--decode", "1"])
    busy = [int(each.output.split("%")[0].split()[-1]) for each in (predicted, without)]
    assert busy[0] > busy[1], "images take time of prefill workers"
