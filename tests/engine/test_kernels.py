"""Triton kernels against the torch kernels that define them: compiled on a GPU, else in Triton's interpreter.

The interpreter's bfloat16 products are wrong, so bfloat16 is for the GPU alone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from baton.engine.kernels import Kernels
from baton.engine.loader.hf_config import read_config
from baton.engine.model_config import ClampedSwiGLU, GeLU
from baton.engine.models.gemma4 import Gemma4
from tests.device import DEVICE
from tests.engine.kernel_checks import BF16, DTYPES, close, normal
from tests.engine.random_checkpoints import save_random

pytestmark = pytest.mark.all

# Pointwise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (2, 4096)])
@pytest.mark.parametrize("add", [False, True])
def test_add_rms_norm(triton_kernels: Kernels, dtype: torch.dtype, rows: int, size: int, add: bool) -> None:
    residual, delta, weight = (
        normal(*s, seed=i).to(dtype) for i, s in enumerate([(rows, size)] * 2 + [(size,)])
    )
    expected = residual.clone()
    out = Kernels().add_rms_norm(expected, delta if add else None, weight, 1e-5)
    ours = residual.to(DEVICE)
    if not add:  # a part of a product
        ours = ours.repeat(1, 2)[:, :size]
    result = triton_kernels.add_rms_norm(ours, delta.to(DEVICE) if add else None, weight.to(DEVICE), 1e-5)
    assert torch.equal(ours.cpu(), expected), "the sum is rounded once, in both"
    close(result, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 96), (3, 1536), (2, 1024)])
def test_silu_mul_and_gelu_mul(triton_kernels: Kernels, dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = (4 * normal(rows, 2 * size)).to(dtype)
    close(triton_kernels.activate(gate_up.to(DEVICE)), Kernels().activate(gate_up))
    close(
        triton_kernels.activate(gate_up.to(DEVICE), activation=GeLU()),
        Kernels().activate(gate_up, activation=GeLU()),
    )
    bounded = ClampedSwiGLU(None, 2.0)
    found = triton_kernels.activate(gate_up.to(DEVICE), activation=bounded)
    close(found, Kernels().activate(gate_up, activation=bounded))


# Products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True])
def test_rows_of_images(triton_kernels: Kernels, dtype: torch.dtype, added: bool) -> None:
    rows, features = torch.randn(5, 1040, dtype=dtype), torch.randn(3, 2, 1040, dtype=dtype)
    index = torch.tensor([-1, 1, -1, 0, 2], dtype=torch.int32)
    expected, found = rows.clone(), rows.to(DEVICE, copy=True)
    Kernels().place_images(expected, index, features, 1, added=added)
    triton_kernels.place_images(found, index.to(DEVICE), features.to(DEVICE), 1, added=added)
    close(found, expected)
    assert torch.equal(found[[0, 2]].cpu(), rows[[0, 2]])
    assert not torch.equal(expected[1], rows[1])


def test_rotations_of_images(triton_kernels: Kernels) -> None:
    rotary, table = torch.randn(4, 2, 12), torch.randn(9, 2, 12)
    index = torch.tensor([1, -1, -1, 0], dtype=torch.int32)
    positions, axes = torch.tensor([[3, 8, 5], [1, 0, 7]]), torch.tensor([0, 1, 2] * 4)
    expected = rotary.clone()
    for row, image in ((0, 1), (3, 0)):
        for i in range(12):
            expected[row, :, i] = table[positions[image, axes[i]], :, i]
    for kernels, device in ((Kernels(), "cpu"), (triton_kernels, DEVICE)):
        found, *others = (x.to(device, copy=True) for x in (rotary, index, positions, table, axes))
        kernels.turn_images(found, *others)
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("rows", "inner", "size", "multiprocessors"),
    [
        (1, 512, 128, 4),
        (3, 1000, 200, 32),
        (20, 520, 64, 8),
        (33, 264, 70, 6),
        (64, 512, 300, 4),
        (1, 1000, 70, 32),
        (2, 512, 61, 16),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_of_few_rows(
    kernel_device: str,
    dtype: torch.dtype,
    rows: int,
    inner: int,
    size: int,
    multiprocessors: int,
    bias: bool,
) -> None:
    """With tiles that W does not fill, with one part, with several, and with whole rows of a small W. The
    counters are 0 afterwards."""
    from baton.engine.kernels.skinny_linear import SkinnyLinear

    x, weight, b = (
        normal(*s, seed=i).to(dtype) for i, s in enumerate([(rows, inner), (size, inner), (size,)])
    )
    linear = SkinnyLinear(weight.to(kernel_device), b.to(kernel_device) if bias else None, multiprocessors)
    expected = F.linear(x.double(), weight.double(), b.double() if bias else None)
    first, second = (linear(x.to(kernel_device)) for _ in range(2))
    close(first, expected)
    assert torch.equal(first, second)


@pytest.mark.parametrize("rows", [16, 17, 64])
def test_linear_of_few_rows_by_the_faster_kernel(kernel_device: str, rows: int) -> None:
    """More than 16 rows may be multiplied by cuBLAS."""
    from baton.engine.kernels.skinny_linear import FewRowsLinear

    shapes = [(rows, 128), (70, 128), (70,)]
    x, weight, b = (normal(*shape, seed=i).to(torch.float16) for i, shape in enumerate(shapes))
    linear = FewRowsLinear(weight.to(kernel_device), b.to(kernel_device), 4)
    expected = F.linear(x.double(), weight.double(), b.double())
    for _ in range(2):  # measures the kernels, then uses one of them
        close(linear(x.to(kernel_device)), expected)


@pytest.mark.gpu
def test_linear_of_few_rows_does_not_depend_on_timing() -> None:
    from baton.engine.kernels.skinny_linear import SkinnyLinear

    x, weight = (normal(*s).to(BF16).cuda() for s in [(64, 14336), (4096, 14336)])
    assert SkinnyLinear.suits(weight)
    linear = SkinnyLinear(weight, None, 264)  # with two parts
    close(linear(x), F.linear(x.cpu().double(), weight.cpu().double()))
    assert all(torch.equal(linear(x), linear(x)) for _ in range(200))


# Whole


def test_a_gpu_replaces_every_operation() -> None:
    from baton.engine.kernels.triton_kernels import TritonKernels

    operations = {name for name in vars(Kernels) if not name.startswith("_")}
    assert operations <= vars(TritonKernels).keys()


def test_a_head_dim_that_no_tile_fits_is_refused(kernel_device: str) -> None:
    from baton.engine.kernels.triton_kernels import TritonKernels

    with pytest.raises(ValueError, match=r"head_dim 24 cannot run on CUDA .* use --device cpu"):
        TritonKernels(torch.device(kernel_device), 24)


def test_wide_heads_in_float32_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForCausalLM"]}))
    config = read_config(tmp_path)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, source="here")
    with pytest.raises(ValueError, match=r"here: a GPU has no room .* heads of 512 in float32; use --dtype"):
        Gemma4(config, on_gpu)
    assert replace(config, head_dim=24).kernel_head_dim == 24, "a GPU refuses it"


TWO_KINDS = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "sliding_window": 4,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {"num_hidden_layers": 2}),
        ("Qwen3Moe", {"num_hidden_layers": 1}),
        ("Llama4Text", {"no_rope_layers": [1, 0], "num_hidden_layers": 2, "attention_chunk_size": 4}),
        (
            "GptOss",
            {
                "num_hidden_layers": 2,
                "sliding_window": 4,
                "attention_bias": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        ("Gemma3Text", {"num_hidden_layers": 2, "sliding_window": 4}),
        (
            "Gemma4Text",
            {
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "num_kv_shared_layers": 1,
                "sliding_window": 4,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
        ),
        ("Olmo2", {"num_hidden_layers": 1}),
        ("Bamba", {"num_hidden_layers": 2}),
        ("DeepseekV3", {"num_hidden_layers": 2}),
        ("GlmMoeDsa", {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "index_topk": 4}),
        ("Qwen3Next", {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}),
        ("Lfm2", {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]}),
        ("NemotronH", {"layers_block_type": ["full_attention", "moe", "linear_attention", "mlp"]}),
        (
            "NemotronH",
            {"layers_block_type": ["full_attention", "linear_attention", "moe"], "moe_latent_size": 32},
        ),
        ("MiniMaxM2", {"num_hidden_layers": 1, "rotary_dim": 8}),
        ("KimiLinear", {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}),
        (
            "MiMoV2Flash",
            {**TWO_KINDS, "v_head_dim": 8, "rope_parameters": None, "partial_rotary_factor": 0.5},
        ),
        (
            "Step3p7",
            {
                **TWO_KINDS,
                "architectures": ["Step3p7ForConditionalGeneration"],
                "num_sliding_attention_heads": 6,
                "swiglu_limits": [0, 0.5],
                "swiglu_limits_shared": [0, 0.5],
                "rope_theta": [5000.0, 100.0],
                "partial_rotary_factors": [0.5, 1.0],
            },
        ),
    ],
)
def test_an_engine_on_these_kernels(
    kind: str, changes: dict[str, Any], tmp_path: Path, check_tokens_of_kernels: Callable[..., None]
) -> None:
    save_random(tmp_path, kind, head_dim=16, **changes)
    check_tokens_of_kernels(tmp_path)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU does not watch it")
@pytest.mark.parametrize("what", ["reads", "writes", "adds"])
@pytest.mark.usefixtures("triton_kernels")
def test_the_interpreter_refuses_memory_of_no_argument(what: str) -> None:
    """As all tests of kernels rely on: a kernel with one element too many fails."""
    import triton
    import triton.language as tl

    @triton.jit
    def copy(x, y, reads, writes, adds):
        at = tl.arange(0, 8)
        values = tl.load(x + at, mask=at < reads, other=0.0)
        tl.store(y + at, values, mask=at < writes)
        tl.atomic_add(y + at, values, mask=at < adds)

    x, y = torch.ones(12)[:6], torch.zeros(12)[:6]
    copy[(1,)](x, y, 6, 6, 6)
    assert y.tolist() == [2.0] * 6
    with pytest.raises(triton.runtime.errors.InterpreterError, match="copy: 1 of 7 elements are not in any"):
        copy[(1,)](x, y, *(6 + (name == what) for name in ("reads", "writes", "adds")))


def test_without_triton_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.engine.kernels import kernels_for

    for name in [name for name in sys.modules if name.split(".")[0] == "triton" or "kernels." in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match=r"--device cuda:1 needs Triton: .*pip install -e '.\[cuda\]'"):
        kernels_for(torch.device("cuda:1"), 64)


def in_another_process(module: str, cache: Path) -> list[str]:
    """Its lines. Triton interprets in this process."""
    ran = subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.long
def test_a_rehearsal_has_all_kernels_of_steps(tmp_path: Path) -> None:
    """So no step of a new machine waits for Triton, as the first one of an engine that follows another."""
    lines = in_another_process("tests.engine.rehearsed_kernels", tmp_path)
    assert [line for line in lines if " tokens from " in line] == []
    assert len(lines) == len({line.partition(":")[0] for line in lines}) == 5


@pytest.mark.long
def test_all_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    lines = in_another_process("tests.engine.compile_kernels", tmp_path)
    compiled = {line.partition(":")[0] for line in lines}
    assert compiled >= {"_prefill", "_split", "_attend_absorbed", "_attend"}
