"""The embedded model keeps its quality in each format of weights.

Measured on a CPU (perplexity, share of equal greedy tokens): float32 3.367, bfloat16 3.357 and 0.961, FP8
weights with FP8 activations 3.385 and 0.953, FP8 weights alone 3.377 and 0.966.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine import EngineConfig, build_engine
from tests.device import DEVICE
from tests.engine.quality import logits, quality


@pytest.fixture(scope="module")
def logits_of(embedded_model_path: Path) -> Callable[..., Tensor]:
    def compute(**config: Any) -> Tensor:
        settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "max_num_batched_tokens": 640}
        return logits(build_engine(EngineConfig(str(embedded_model_path), **{**settings, **config})))

    return compute


@pytest.fixture(scope="module")
def reference(logits_of: Callable[..., Tensor]) -> Tensor:
    """In float32 on the CPU."""
    return logits_of()


@pytest.mark.long
def test_fp8_weights_and_activations(
    logits_of: Callable[..., Tensor], reference: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = DEVICE != "cpu"
    if not on_gpu:
        monkeypatch.setattr("engine.loader.fp8_formats.quantizes_activations", lambda device: True)
    ours = logits_of(quantization="fp8", device=DEVICE, dtype="bfloat16" if on_gpu else "float32")
    found, exact = quality(ours, reference), quality(reference, reference)
    assert found.perplexity <= 1.02 * exact.perplexity
    assert found.equal >= 0.92
