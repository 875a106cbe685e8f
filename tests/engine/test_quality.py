"""The embedded model keeps its quality in each format of weights.

Measured on a CPU (perplexity, share of equal greedy tokens): float32 3.367, bfloat16 3.357 and 0.961, FP8
weights with FP8 activations 3.385 and 0.953, FP8 weights alone 3.377 and 0.966, packed 4-bit weights in
bfloat16 3.361 and 0.967.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine import Engine, EngineConfig, build_engine
from tests.device import DEVICE
from tests.engine.quality import logits, quality


@pytest.fixture(scope="module")
def engine_of(embedded_model_path: Path) -> Callable[..., Engine]:
    def make(**config: Any) -> Engine:
        settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "max_num_batched_tokens": 640}
        return build_engine(EngineConfig(str(embedded_model_path), **{**settings, **config}))

    return make


@pytest.fixture(scope="module")
def reference(engine_of: Callable[..., Engine]) -> Tensor:
    """In float32 on the CPU."""
    return logits(engine_of())


@pytest.mark.long
def test_fp8_weights_and_activations(
    engine_of: Callable[..., Engine], reference: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = DEVICE != "cpu"
    if not on_gpu:
        monkeypatch.setattr("engine.loader.fp8_formats.from_hopper_on", lambda device: True)
    engine = engine_of(quantization="fp8", device=DEVICE, dtype="bfloat16" if on_gpu else "float32")
    exact = quality(reference, reference)
    # On a GPU: cuBLAS, then the kernel for few rows.
    for chunk in (640, 48) if on_gpu else (640,):
        found = quality(logits(engine, chunk), reference)
        assert found.perplexity <= 1.02 * exact.perplexity
        assert found.equal >= 0.92


def test_packed_weights(engine_of: Callable[..., Engine], reference: Tensor) -> None:
    """The default on a CPU. The last quarter of the text is decoded, which has kernels of its own."""
    found = quality(logits(engine_of(dtype="auto", device="cpu"), decoded=160), reference)
    assert found.perplexity <= 1.01 * quality(reference, reference).perplexity
    assert found.equal >= 0.94


@pytest.mark.gpu
def test_packed_weights_on_a_gpu(engine_of: Callable[..., Engine], reference: Tensor) -> None:
    """Dequantized for a long chunk, then the kernel for few rows."""
    engine = engine_of(dtype="bfloat16", quantization="gguf", device=DEVICE)
    for chunk in (640, 48):
        found = quality(logits(engine, chunk), reference)
        assert found.perplexity <= 1.01 * quality(reference, reference).perplexity
        assert found.equal >= 0.94
