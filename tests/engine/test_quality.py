"""The embedded model keeps its quality in each format of weights.

Measured on a CPU (perplexity, share of equal greedy tokens): float32 3.367, bfloat16 3.357 and 0.961, FP8
weights with FP8 activations 3.385 and 0.953, FP8 weights alone 3.377 and 0.966, packed 4-bit weights in
bfloat16 3.361 and 0.967, a KV cache in FP8 3.367 and 0.970. Weights rounded to INT4 on load, with the output
projection in FP8, have 3.636 and 0.817.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine import Engine, EngineConfig, build_engine
from baton.engine.kernels import Fp8KV, Kernels, LinearMethod, parts
from baton.engine.layers.weights import Stack, Weights
from baton.engine.loader.int4_on_load import Int4OnLoad
from tests.device import DEVICE
from tests.engine.quality import TEXT, logits, quality

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def engine_of(embedded_model_path: Path) -> Callable[..., Engine]:
    def make(**config: Any) -> Engine:
        settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "max_num_batched_tokens": 640}
        return build_engine(EngineConfig(str(embedded_model_path), **{**settings, **config}))

    return make


SHORT = 240
"""Positions of the text in tests that are not long. Their perplexity is 5.14 in float32."""


@pytest.fixture(scope="module")
def short_reference(engine_of: Callable[..., Engine]) -> Tensor:
    """In float32 on the CPU."""
    return logits(engine_of(), stop=SHORT)


@pytest.fixture(scope="module")
def reference(engine_of: Callable[..., Engine]) -> Tensor:
    """The same of the whole text."""
    return logits(engine_of())


@pytest.mark.long
def test_fp8_weights_and_activations(
    engine_of: Callable[..., Engine], reference: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = DEVICE != "cpu"
    if not on_gpu:
        monkeypatch.setattr("baton.engine.loader.fp8_formats.from_hopper_on", lambda device: True)
    engine = engine_of(quantization="fp8", device=DEVICE, dtype="bfloat16" if on_gpu else "float32")
    # On a GPU: cuBLAS, then the kernel for few rows.
    for chunk in (640, 48) if on_gpu else (640,):
        assert_close(logits(engine, chunk), reference, 1.02, 0.92)


@pytest.mark.long
def test_int4_weights_rounded_on_load(
    engine_of: Callable[..., Engine], reference: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output projection is in FP8, as in a model where it is not tied to the embedding."""
    on_gpu = DEVICE != "cpu"
    if not on_gpu:
        monkeypatch.setattr("baton.engine.loader.fp8_formats.from_hopper_on", lambda device: True)
    monkeypatch.setattr(Int4OnLoad, "tied", output_in_fp8)
    engine = engine_of(quantization="int4", device=DEVICE, dtype="bfloat16" if on_gpu else "float32")
    # On a GPU: products in FP8, the kernel for few rows, and the one for up to 2 rows.
    for chunk, decoded in ((640, 0), (48, 64), (24, 0)) if on_gpu else ((640, 0),):
        assert_close(logits(engine, chunk, decoded), reference, 1.09, 0.8)


def assert_close(found: Tensor, reference: Tensor, perplexity: float, equal: float) -> None:
    """`perplexity`: at most so many times that of the reference. `equal`: share of its greedy tokens."""
    measured = quality(found, reference)
    assert measured.perplexity <= perplexity * quality(reference, reference).perplexity
    assert measured.equal >= equal


def output_in_fp8(self: Int4OnLoad, weights: Weights, stack: Stack, embedding: Tensor) -> LinearMethod:
    return self.output.linear(weights, stack)


@pytest.mark.long
def test_packed_weights(engine_of: Callable[..., Engine], short_reference: Tensor) -> None:
    """The default on a CPU. The end of the text is decoded, which has kernels of its own."""
    assert_close(
        logits(engine_of(dtype="auto", device="cpu"), decoded=24, stop=SHORT), short_reference, 1.01, 0.94
    )


def test_kv_in_fp8(engine_of: Callable[..., Engine], short_reference: Tensor) -> None:
    assert_close(logits(engine_of(kv_cache_dtype="fp8"), SHORT // 2, stop=SHORT), short_reference, 1.02, 0.94)


@pytest.mark.gpu
def test_kv_in_fp8_on_a_gpu(engine_of: Callable[..., Engine], reference: Tensor) -> None:
    """Prompts, then decodes."""
    engine = engine_of(dtype="bfloat16", quantization="none", kv_cache_dtype="fp8", device=DEVICE)
    for decoded in (0, 160):
        assert_close(logits(engine, decoded=decoded), reference, 1.02, 0.92)


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [("auto", "fp8"), ("fp8", "auto")])
def test_kv_that_is_converted(
    engine_of: Callable[..., Engine], reference: Tensor, prefill: str, decode: str
) -> None:
    """The first half of the text by one engine, and the rest by another one, which has converted its KV."""
    half = len(TEXT) // 2 // 16 * 16
    source, target = (engine_of(kv_cache_dtype=dtype) for dtype in (prefill, decode))
    first = logits(source, stop=half)
    for there, here in zip(source.caches, target.caches, strict=True):
        values, scales = parts(there)
        exact = values if scales is None else values.float() * scales.transpose(2, 3)[..., None]
        if isinstance(here, Fp8KV):
            rows = Kernels().quantize(exact.flatten(0, 3), grouped=False)
            here.values.copy_(rows.values.view(exact.shape))
            here.scales.copy_(rows.scales.view(exact.shape[:-1]).transpose(2, 3))
        else:
            here.copy_(exact)
    assert_close(torch.cat((first, logits(target, first=half))), reference, 1.02, 0.94)


@pytest.mark.gpu
def test_packed_weights_on_a_gpu(engine_of: Callable[..., Engine], reference: Tensor) -> None:
    """The default from Hopper on. More than 32 rows multiply in FP8, so they have the bounds of FP8."""
    engine = engine_of(dtype="auto", device=DEVICE)
    for chunk, perplexity, equal in ((640, 1.02, 0.92), (48, 1.02, 0.92), (24, 1.01, 0.94)):
        assert_close(logits(engine, chunk), reference, perplexity, equal)
