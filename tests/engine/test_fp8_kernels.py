"""FP8 kernels against the torch kernels that define them: compiled on a GPU, else in Triton's interpreter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.kernels import FP8, Both, Choice, Experts, Fp8Experts, Kernels, Quantized
from baton.engine.layers.current_step import CurrentStep, computing
from baton.engine.layers.ranks import Ranks
from baton.engine.model_config import Scoring
from tests.device import DEVICE
from tests.engine import kernel_checks
from tests.engine.checkpoints import load
from tests.engine.kernel_checks import BF16, DTYPES, F16, F32, normal
from tests.engine.random_checkpoints import save_random
from tests.engine.test_fp8 import LATENT, SIZES, quantize

pytestmark = [pytest.mark.all, pytest.mark.usefixtures("exact_casts")]

CLOSE = {F32: 2e-5, F16: 4e-3, BF16: 8e-3}
"""Largest error of a product, relative to its size, if both sides multiply the same FP8 numbers."""
FAST = 2e-2
"""The same for a product of 14,336 columns: the tensor cores of Hopper keep 14 bits of a sum."""


def close(ours: Tensor, reference: Tensor, bound: float | None = None) -> None:
    kernel_checks.close(ours, reference, bound or CLOSE[ours.dtype])


def same(ours: Quantized, reference: Quantized) -> None:
    """Scales that differ by a rounding error may move a value that is between two FP8 numbers to the other
    one. Few are that close."""
    torch.testing.assert_close(ours.scales.cpu(), reference.scales, rtol=4e-3, atol=0.0)
    values, expected = ours.values.cpu().float(), reference.values.float()
    torch.testing.assert_close(values, expected, rtol=0.13, atol=2**-9)
    assert (values != expected).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 200), (2, 4096)])
@pytest.mark.parametrize("grouped", [False, True])
def test_quantized_results(
    triton_kernels: Kernels, dtype: torch.dtype, rows: int, size: int, grouped: bool
) -> None:
    """Rows of different sizes, one of them zeros. The norm adds to the residual, as without FP8. Both forms
    have the bits of the norm without FP8, and of quantizing that."""
    x = (normal(rows, size) * 100 ** torch.arange(rows)[:, None]).to(dtype)
    x[-1] *= rows == 1
    put = lambda tensor: tensor.to(DEVICE, copy=True)  # noqa: E731
    expected = Kernels().quantize(x, grouped=grouped)
    assert expected.scales.shape == (rows, -(-size // 128) if grouped else 1)
    same(triton_kernels.quantize(put(x), grouped=grouped), expected)

    gate_up = torch.cat((normal(rows, size, seed=1).to(dtype), x), dim=1)
    exact = Kernels().quantize(Kernels().activate(gate_up.float()), grouped=grouped)
    same(triton_kernels.activate(put(gate_up), grouped), exact)

    delta, weight, residual = normal(rows, size, seed=2).to(dtype), normal(size, seed=3).to(dtype), put(x)
    plain = triton_kernels.add_rms_norm(put(x), put(delta), put(weight), 1e-5)
    both = triton_kernels.add_rms_norm(put(x), put(delta), put(weight), 1e-5, grouped, both=True)
    assert torch.equal(both.plain, plain)
    for found, apart in zip(both.quantized, triton_kernels.quantize(plain, grouped=grouped), strict=True):
        assert torch.equal(found.float(), apart.float())
    ours = triton_kernels.add_rms_norm(residual, put(delta), put(weight), 1e-5, grouped)
    x.add_(delta)
    exact = Kernels().add_rms_norm(x.float(), None, weight.float(), 1e-5)
    same(ours, Kernels().quantize(exact, grouped=grouped))
    assert torch.equal(residual.cpu(), x)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_row_that_is_not_finite_spoils_no_other(triton_kernels: Kernels, grouped: bool) -> None:
    x = normal(4, 256).to(DEVICE)
    expected = triton_kernels.quantize(x.clone(), grouped=grouped)
    linear = fp8_linear(triton_kernels, DEVICE, 256, 64, grouped)
    product = linear(expected)
    x[1, 3], x[2, 200] = torch.inf, torch.nan
    spoilt = triton_kernels.quantize(x, grouped=grouped)
    assert torch.equal(spoilt.scales[[0, 3]], expected.scales[[0, 3]])
    spoilt_product = linear(spoilt)
    assert torch.equal(spoilt_product[[0, 3]], product[[0, 3]])
    assert not spoilt_product[[1, 2]].isfinite().any()


def fp8_linear(
    kernels: Kernels, device: str, inner: int, size: int, grouped: bool, *, dtype: torch.dtype = F32
) -> Any:
    weight, scales = random_weight(inner, size, grouped)
    return kernels.fp8_linear(weight.to(device), scales.to(device), None, dtype)


def random_weight(inner: int, size: int, grouped: bool, *, blocks: bool = False) -> tuple[Tensor, Tensor]:
    groups = -(-inner // 128) if grouped else 1
    values = (100 * normal(size, inner, seed=5)).clamp(-448, 448)  # some versions of torch cast more to NaN
    scaled = size // 128 if blocks else size
    return values.to(FP8), (0.01 + normal(groups, scaled, seed=6).abs()) / 100


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("rows", "inner", "size", "multiprocessors", "bias"),
    [
        (1, 512, 128, 4, False),
        (3, 1008, 200, 32, True),
        (20, 528, 64, 8, False),
        (100, 512, 140, 12, True),
        (130, 256, 200, 12, False),
    ],
)
@pytest.mark.parametrize("scales_of", ["rows", "groups", "blocks"])
def test_linear(
    kernel_device: str,
    dtype: torch.dtype,
    rows: int,
    inner: int,
    size: int,
    multiprocessors: int,
    bias: bool,
    scales_of: str,
) -> None:
    """With tiles that W does not fill, with one part and with several. The counters are 0 afterwards. All of
    these run by the kernel."""
    from baton.engine.kernels.quantized.fp8_linear import Fp8Linear

    grouped, blocks = scales_of != "rows", scales_of == "blocks"
    if blocks:
        size += -size % 128
    weight, scales = random_weight(inner, size, grouped, blocks=blocks)
    b = normal(size, seed=2) if bias else None
    x = Kernels().quantize(normal(rows, inner), grouped=grouped)
    expected = Kernels().fp8_linear(weight, scales, b, F32)(x)
    added = None if b is None else b.to(kernel_device, dtype)
    linear = Fp8Linear(weight.to(kernel_device), scales.to(kernel_device), added, dtype, multiprocessors)
    put_x = Quantized(*(tensor.to(kernel_device) for tensor in x))
    first, second = (linear.triton(put_x) for _ in range(2))
    close(first, expected)
    assert torch.equal(first, second)


def test_many_rows_take_the_kernel_if_all_tiles_run_at_once() -> None:
    """The products of Llama-3.1-8B, as measured on an H200."""
    from baton.engine.kernels.quantized.fp8_linear import runs_at_once

    fits = [size for size in (1024, 4096, 6144, 28672) if runs_at_once(256, size, 132)]
    assert fits == [4096]
    assert not runs_at_once(257, 4096, 132)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("scales_of", ["rows", "groups", "blocks"])
@pytest.mark.parametrize(
    ("tokens", "chosen", "first", "held", "scoring"),
    [
        (1, 1, 0, 6, Scoring.SIGMOID_ON_INPUT),
        (3, 3, 0, 6, Scoring.NORMALIZED_SOFTMAX),
        (70, 4, 2, 3, Scoring.SOFTMAX),
    ],
)
def test_mix_experts(
    triton_kernels: Kernels,
    dtype: torch.dtype,
    scales_of: str,
    tokens: int,
    chosen: int,
    first: int,
    held: int,
    scoring: Scoring,
) -> None:
    """Few and many pairs of an expert, all experts and some of them."""
    size, inner = (256, 192) if scales_of == "blocks" else (272, 144)
    grouped, blocks = scales_of != "rows", scales_of == "blocks"
    gate_up, down = (
        random_experts(held, *shape, grouped, blocks=blocks) for shape in ((2 * inner, size), (size, inner))
    )
    x, logits = normal(tokens, size), normal(tokens, 6, seed=3)

    def mix(kernels: Kernels, device: str, dtype: torch.dtype) -> Tensor:
        one, other = (Fp8Experts(*(t.to(device) for t in weight)) for weight in (gate_up, down))
        counts = torch.zeros(6, dtype=torch.int32, device=device)
        rows, routes = x.to(device, dtype), logits.to(device, dtype)
        both = Both(rows, kernels.quantize(rows, grouped=grouped))
        return kernels.mix_experts(both, routes, Experts(one, other, Choice(chosen, scoring), first), counts)

    expected = mix(Kernels(), "cpu", F32)
    ours = mix(triton_kernels, DEVICE, dtype)
    close(ours, expected, 0.05)  # values between two FP8 numbers may be rounded to either


@pytest.mark.usefixtures("one_form")
@pytest.mark.parametrize(
    ("kind", "grouped"), [("Qwen3Next", False), ("blocks", True)], ids=["shared gate", "blocks"]
)
def test_the_norm_before_experts_quantizes_for_all_of_them(
    kind: str, grouped: bool, triton_kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another launch for the experts or the shared expert, and with the bits of quantizing the rows
    of the model's dtype apart."""
    from baton.engine.kernels import fp8

    monkeypatch.setattr("baton.engine.loader.fp8_formats.from_hopper_on", lambda device: True)
    for module in ("baton.engine.execution.start", "baton.engine.layers.weights"):
        monkeypatch.setattr(f"{module}.kernels_for", lambda device, head_dim, exact=False: triton_kernels)
    if grouped:
        save_random(tmp_path, "DeepseekV3", **LATENT)
        quantize(tmp_path, kind)
    else:
        save_random(tmp_path, kind, moe_intermediate_size=32, linear_num_value_heads=8)
    dtype = "float16" if DEVICE == "cpu" else "bfloat16"
    model = load(tmp_path, device=DEVICE, dtype=dtype, quantization="auto" if grouped else "fp8").runner.model
    layer = model.layers[-1]
    moe, norm = layer.mlp, layer.mlp_norm.norm
    residual, delta = (normal(5, len(norm.weight), seed=i).to(DEVICE, norm.weight.dtype) for i in range(2))
    counts = torch.zeros(len(model.layers), 8, dtype=torch.int32, device=DEVICE)

    plain = triton_kernels.add_rms_norm(residual.clone(), delta, norm.weight, norm.eps)
    shared = moe.shared(plain)
    if moe.shared_gate is not None:
        shared *= moe.shared_gate(plain).sigmoid()
    both = Both(plain, triton_kernels.quantize(plain, grouped=grouped))
    expected = triton_kernels.mix_experts(
        both, moe.router(plain), moe.experts, counts[0].clone(), shared=lambda: shared
    )
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "_quantize", None)
        x = layer.mlp_norm(residual.clone(), delta)
        with computing(CurrentStep(5, expert_counts=counts)):
            y = moe(x)
    assert torch.equal(y, expected)
    several = Ranks()
    several.size = 2
    monkeypatch.setattr(norm, "ranks", several)  # then another kernel may sum their terms
    for found in (x, layer.mlp_norm(residual, delta)):
        assert torch.equal(found.plain, plain)
        for ours, apart in zip(found.quantized, both.quantized, strict=True):
            assert torch.equal(ours.float(), apart.float())


def random_experts(
    experts: int, out: int, columns: int, grouped: bool, *, blocks: bool = False
) -> Fp8Experts:
    each = [Kernels().quantize(normal(out, columns, seed=i), grouped=grouped) for i in range(experts)]
    values, scales = zip(*each, strict=True)
    of_rows = torch.stack([scale.T for scale in scales]).contiguous() / 8
    return Fp8Experts(torch.stack(values), of_rows[..., ::128].contiguous() if blocks else of_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "inner", "blocks"), [(200, 14336, False), (200, 14336, True), (203, 1024, True)]
)
def test_cublas_and_the_kernel_multiply_the_same_numbers(
    bias: bool, rows: int, inner: int, blocks: bool
) -> None:
    """A token does not depend on the number of rows by more than the order of a sum. cuBLAS needs a
    multiple of 4 rows if x has groups, unlike 203."""
    from baton.engine.kernels.quantized.fp8_linear import Fp8Linear

    weight, scales = (tensor.cuda() for tensor in random_weight(inner, 4096, blocks, blocks=blocks))
    x = Kernels().quantize(normal(rows, inner), grouped=blocks)
    b = normal(4096).to(BF16).cuda() if bias else None
    linear = Fp8Linear(weight, scales, b, BF16, 264)  # with two parts
    many = linear.cublas(Quantized(*(tensor.cuda() for tensor in x)))
    few = linear(Quantized(*(tensor[:64].cuda() for tensor in x)))
    close(few, many[:64].cpu(), FAST)
    expected = Kernels().fp8_linear(weight.cpu(), scales.cpu(), None if b is None else b.cpu(), F32)(x)
    close(many, expected, FAST)
    few_x = Quantized(*(tensor[:64].cuda() for tensor in x))
    assert all(torch.equal(linear(few_x), few) for _ in range(200)), "timing changes nothing"


@pytest.mark.skipif(
    DEVICE != "cpu", reason="a GPU computes in bfloat16, and has tests/engine/test_quality.py"
)
@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "Olmo2", "DeepseekV3", "blocks"])
def test_an_engine_on_these_kernels(
    kind: str, tmp_path: Path, check_tokens_of_kernels: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch kernels quantize activations, too. A kind of model is quantized on load."""
    monkeypatch.setattr("baton.engine.loader.fp8_formats.from_hopper_on", lambda device: True)
    if kind == "blocks":
        save_random(tmp_path, "Llama", **{**SIZES, "num_key_value_heads": 1})
        quantize(tmp_path, kind)
        check_tokens_of_kernels(tmp_path)
    else:
        sizes = {**LATENT, "first_k_dense_replace": 0} if kind == "DeepseekV3" else {}
        save_random(tmp_path, kind, **{**sizes, "num_hidden_layers": 1})
        check_tokens_of_kernels(tmp_path, quantization="fp8")
