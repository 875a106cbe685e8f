"""Mamba-2 and the gated delta rule: the torch kernels against the recurrence one token at a time, and the
Triton kernels against them.

The interpreter's bfloat16 products are wrong, so bfloat16 is for the GPU alone.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels import (
    AttentionMetadata,
    GatedDelta,
    Kernels,
    KimiDelta,
    LayerState,
    Mamba2,
    StateLayer,
)
from tests.device import DEVICE
from tests.engine.kernel_checks import BF16, CLOSE, DTYPES, F16, F32, close, normal

pytestmark = pytest.mark.all

HEADS, HEAD_DIM, SIZE, WIDTH = 4, 16, 32, 4
INF = float("inf")
COPIED = 64
"""Whole chunks of any kernel."""


def layer_of(groups: int, dtype: torch.dtype, *, bias: bool = True, dt_limits: Any = (0.0, INF)) -> Mamba2:
    channels = HEADS * HEAD_DIM + 2 * groups * SIZE
    return Mamba2(
        (normal(WIDTH, channels, seed=1) / 2).to(dtype),
        normal(channels, seed=2).to(dtype) if bias else None,
        normal(HEADS, seed=3),
        -normal(HEADS, seed=4).exp(),
        groups,
        normal(HEADS, seed=5),
        dt_limits,
    )


@dataclass
class Step:
    """Requests with (start, stop) positions each: those of one token first. Two of the prompts with COPIED
    tokens get a copy of their state after so many."""

    spans: list[tuple[int, int]]
    layer: Mamba2
    dtype: torch.dtype = F32
    state_dtype: torch.dtype = F32

    def __post_init__(self) -> None:
        tokens = sum(stop - start for start, stop in self.spans)
        channels = self.layer.conv_weight.shape[1]
        self.projected = normal(tokens, 8 + channels + HEADS, seed=6).to(self.dtype)[:, 8:]  # beside a gate
        requests = len(self.spans)
        self.slots = torch.randperm(requests + 2, generator=torch.Generator().manual_seed(7))[:requests].int()
        conv = normal(requests + 2, WIDTH - 1, channels, seed=8).to(self.dtype)
        heads = normal(requests + 2, HEADS, HEAD_DIM, SIZE, seed=9).to(self.state_dtype)
        self.state = LayerState(conv, heads)
        for slot, (start, _) in zip(self.slots.tolist(), self.spans, strict=True):
            if not start:  # what an earlier request may have left there
                for part in self.state:
                    part[slot] = torch.nan
        self.decodes = sum(stop - start == 1 for start, stop in self.spans)
        ends = accumulate(stop - start for start, stop in self.spans)
        long = [end - (stop - start) for end, (start, stop) in zip(ends, self.spans, strict=True)
                if stop - start >= COPIED]  # fmt: skip
        spare = [slot for slot in range(requests + 2) if slot not in self.slots.tolist()]
        self.copies = {row + COPIED - 1: slot for row, slot in zip(long[-2:], spare, strict=False)}

    def metadata(self, device: str) -> AttentionMetadata:
        slots, tables = torch.empty(len(self.projected), device=device), torch.empty(0, device=device)
        contexts = torch.tensor([stop for _, stop in self.spans], dtype=torch.int32, device=device)
        copies = torch.zeros(len(self.projected), dtype=torch.int32)
        for row, slot in self.copies.items():
            copies[row] = slot + 1
        return AttentionMetadata(
            1, slots, tables, contexts, self.decodes, self.spans[self.decodes :],
            state_slots=self.slots.to(device), state_copies=copies.to(device) if self.copies else None,
        )  # fmt: skip

    def run(self, kernels: Kernels, device: str = "cpu") -> tuple[Tensor, LayerState]:
        """y, and the states after the step."""
        state = LayerState(*(part.to(device, copy=True) for part in self.state))
        tiling = kernels.tile_states(self.metadata(device), self.dtype)
        x, *rates = (part.to(device) for part in self.inputs())
        y = kernels.mix_states(x, rates, self.parameters(device), state, tiling)
        return y, LayerState(*(part.cpu() for part in state))

    def inputs(self) -> list[Tensor]:
        """The channels, and what a token has beside them."""
        return [*self.projected.tensor_split([self.layer.conv_weight.shape[1]], dim=1)]

    def parameters(self, device: str) -> StateLayer:
        return on(self.layer, device)

    def token_by_token(self) -> tuple[Tensor, LayerState]:
        """The definition, in float64."""
        layer, rows = self.layer, []
        conv, ssm = (part.double() for part in self.state)
        weight, groups = layer.conv_weight.double(), layer.groups
        row = 0
        for slot, (start, stop) in zip(self.slots.tolist(), self.spans, strict=True):
            for position in range(start, stop):
                if position == 0:
                    conv[slot], ssm[slot] = 0, 0
                x, dt = self.projected[row].double().split((conv.shape[2], HEADS))
                inputs = torch.cat((conv[slot], x[None]))
                conv[slot] = inputs[1:]
                total = (inputs * weight).sum(0)
                mixed = F.silu(total if layer.conv_bias is None else total + layer.conv_bias.double())
                x, b, c = mixed.split((HEADS * HEAD_DIM, groups * SIZE, groups * SIZE))
                x = x.view(HEADS, HEAD_DIM)
                b, c = (of.view(groups, SIZE).repeat_interleave(HEADS // groups, 0) for of in (b, c))
                step = F.softplus(dt + layer.dt_bias.double()).clamp(*layer.dt_limits)[:, None, None]
                decay = (step * layer.a.double()[:, None, None]).exp()
                ssm[slot] = decay * ssm[slot] + step * x[:, :, None] * b[:, None]
                rows.append(((ssm[slot] @ c[:, :, None])[..., 0] + layer.d[:, None] * x).flatten())
                if row in self.copies:
                    conv[self.copies[row]], ssm[self.copies[row]] = conv[slot], ssm[slot]
                row += 1
        return torch.stack(rows), LayerState(conv, ssm)

    def bound(self) -> float:
        """Of the relative error."""
        return CLOSE[self.dtype]

    def compare(self, found: tuple[Tensor, LayerState], expected: tuple[Tensor, LayerState]) -> None:
        y, state = found
        close(y, expected[0], self.bound())
        used = torch.tensor([*self.slots.tolist(), *self.copies.values()])
        assert torch.equal(state.conv[used].double(), expected[1].conv[used].double())
        wanted = expected[1].ssm[used].double()
        error = (state.ssm[used].double() - wanted).norm() / wanted.norm()
        assert error <= max(self.bound(), CLOSE[self.state_dtype])
        others = [slot for slot in range(len(state.conv)) if slot not in used.tolist()]
        for part, before in zip(state, self.state, strict=True):
            assert torch.equal(part[others], before[others]), "other states do not change"


def on(layer: Mamba2, device: str) -> Mamba2:
    bias = None if layer.conv_bias is None else layer.conv_bias.to(device)
    tensors = {name: getattr(layer, name).to(device) for name in ("conv_weight", "dt_bias", "a", "d")}
    return replace(layer, conv_bias=bias, **tensors)


BATCHES = {
    "decodes": [(0, 1), (5, 6), (1, 2)],
    "shorter than the convolution": [(0, 2), (2, 4), (1, 4)],
    "ragged": [(9, 10), (0, 3), (0, 33), (40, 105), (7, 71)],
    "whole chunks": [(0, 64), (64, 128), (0, 128)],
}


@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("groups", "exact"), [(1, False), (2, False), (2, True)])
def test_torch_equals_the_recurrence(spans: list[tuple[int, int]], groups: int, exact: bool) -> None:
    step = Step(spans, layer_of(groups, F32))
    step.compare(step.run(Kernels(exact=exact)), step.token_by_token())


def test_limits_of_the_time_step() -> None:
    step = Step(BATCHES["ragged"], layer_of(1, F32, bias=False, dt_limits=(0.3, 0.9)))
    step.compare(step.run(Kernels()), step.token_by_token())


@pytest.fixture(params=[False, True], ids=["default", "exact"])
def default_and_exact(
    triton_kernels: Kernels, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Kernels:
    monkeypatch.setattr(triton_kernels, "exact", request.param)
    return triton_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spans", "groups", "dt_limits"),
    [
        (BATCHES["decodes"], 2, (0.0, INF)),
        (BATCHES["shorter than the convolution"], 1, (0.3, 0.9)),
        (BATCHES["ragged"], 1, (0.0, INF)),
        (BATCHES["whole chunks"], 4, (0.0, INF)),
    ],
)
def test_triton_equals_torch(
    default_and_exact: Kernels, dtype: torch.dtype, spans: list[tuple[int, int]], groups: int, dt_limits: Any
) -> None:
    step = Step(spans, layer_of(groups, dtype, bias=groups > 1, dt_limits=dt_limits), dtype)
    step.compare(step.run(default_and_exact, DEVICE), step.run(Kernels()))


@pytest.mark.parametrize("state_dtype", [F16, BF16])
@pytest.mark.parametrize("spans", [BATCHES["decodes"], BATCHES["ragged"]], ids=["decodes", "ragged"])
def test_states_in_another_dtype_are_rounded_once_a_step(
    default_and_exact: Kernels, spans: list[tuple[int, int]], state_dtype: torch.dtype
) -> None:
    """Products in bfloat16 are wrong in the interpreter, but the states are only rounded to it: down, where a
    GPU takes the nearest value."""
    step = Step(spans, layer_of(2, F32), state_dtype=state_dtype)
    exact = replace(step, state_dtype=F32)
    exact.state = LayerState(step.state.conv, step.state.ssm.float())
    for kernels, device in ((Kernels(exact=default_and_exact.exact), "cpu"), (default_and_exact, DEVICE)):
        y, state = step.run(kernels, device)
        expected = exact.run(Kernels())
        assert state.ssm.dtype is state_dtype
        close(y, expected[0], CLOSE[state_dtype] if default_and_exact.exact else None)
        if default_and_exact.exact:  # each token of a prompt is a step, so all but decodes are rounded often
            continue
        used = torch.tensor([*step.slots.tolist(), *step.copies.values()])
        # Beside the same kernel's states in float32: a GPU's products (TF32) are further from those of torch.
        rounded = exact.run(kernels, device)[1].ssm[used].to(state_dtype)
        last_bits = torch.finfo(state_dtype).eps * rounded.float().abs() + 1e-6
        assert ((state.ssm[used].float() - rounded.float()).abs() <= last_bits).all()
        if kernels is not default_and_exact or DEVICE != "cpu" or state_dtype is F16:
            assert (state.ssm[used] == rounded).float().mean() > 0.99, "to the nearest"


def test_heads_and_states_of_any_size(triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton computes with powers of 2, of at least 16 in a product. The step of decodes cuts this head."""
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", 40)
    monkeypatch.setattr(sys.modules[__name__], "SIZE", 12)
    step = Step(BATCHES["ragged"], layer_of(2, F32))
    step.compare(step.run(triton_kernels, DEVICE), step.run(Kernels()))


class DeltaStep(Step):
    """As `Step`, with the gated delta rule in place of Mamba-2."""

    def inputs(self) -> list[Tensor]:
        """With β of each head."""
        return [*super().inputs(), normal(len(self.projected), HEADS, seed=10).to(self.dtype)]

    def parameters(self, device: str) -> GatedDelta:
        """Its states decay so slowly that all tokens of a chunk count."""
        layer = on(self.layer, device)
        return GatedDelta(layer.conv_weight, None, layer.dt_bias, layer.a / 64, layer.groups)

    def token_by_token(self) -> tuple[Tensor, LayerState]:
        layer, rows, groups = self.parameters("cpu"), [], self.layer.groups
        conv, ssm = (part.double() for part in self.state)
        inputs, row = self.inputs(), 0
        for slot, (start, stop) in zip(self.slots.tolist(), self.spans, strict=True):
            for position in range(start, stop):
                if position == 0:
                    conv[slot], ssm[slot] = 0, 0
                x, dt, beta = (part[row].double() for part in inputs)
                window = torch.cat((conv[slot], x[None]))
                conv[slot] = window[1:]
                mixed = F.silu((window * layer.conv_weight.double()).sum(0))
                v, k, q = mixed.split((HEADS * HEAD_DIM, groups * SIZE, groups * SIZE))
                k, q = (of.view(groups, SIZE).repeat_interleave(HEADS // groups, 0) for of in (k, q))
                k, q = (of / (of.square().sum(1, keepdim=True) + 1e-6).sqrt() for of in (k, q))
                step = F.softplus(dt + layer.dt_bias.double()).view(HEADS, -1) * layer.a.double()[:, None]
                ssm[slot] *= step.exp()[:, None]
                written = v.view(HEADS, HEAD_DIM) - (ssm[slot] @ k[:, :, None])[..., 0]
                ssm[slot] += (beta.sigmoid()[:, None] * written)[:, :, None] * k[:, None]
                rows.append((ssm[slot] @ q[:, :, None]).flatten() / SIZE**0.5)
                if row in self.copies:
                    conv[self.copies[row]], ssm[self.copies[row]] = conv[slot], ssm[slot]
                row += 1
        return torch.stack(rows), LayerState(conv, ssm)


@dataclass
class KimiStep(DeltaStep):
    """As `DeltaStep`, with a factor for each dimension of a key. `rate`: of the decay."""

    rate: float = 1 / 64

    def inputs(self) -> list[Tensor]:
        x, _, beta = super().inputs()
        return [x, normal(len(x), HEADS * SIZE, seed=11).to(self.dtype), beta]

    def parameters(self, device: str) -> GatedDelta:
        layer, bias = on(self.layer, device), normal(HEADS * SIZE, seed=12).to(device)
        return KimiDelta(layer.conv_weight, None, bias, layer.a * self.rate, HEADS)

    def bound(self) -> float:
        """Exponents are differences of sums over the tokens of a prompt, in any order: each is wrong by the
        rounding of such a sum. What is compared is the error of all."""
        layer, most = self.parameters("cpu"), max(stop - start for start, stop in self.spans)
        steps = F.softplus(self.inputs()[1].float() + layer.dt_bias).view(-1, HEADS, SIZE)
        typical = (steps.mean(0) * layer.a[:, None]).abs().mean() * most
        return max(super().bound(), float(typical) * 2**-24)


@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("kind", "groups", "exact"),
    [
        (DeltaStep, 1, False),
        (DeltaStep, 2, False),
        (DeltaStep, 2, True),
        (KimiStep, 4, False),
        (KimiStep, 4, True),
    ],
)
def test_the_gated_delta_rule_equals_the_recurrence(
    spans: list[tuple[int, int]], kind: type[DeltaStep], groups: int, exact: bool
) -> None:
    step = kind(spans, layer_of(groups, F32))
    step.compare(step.run(Kernels(exact=exact)), step.token_by_token())


def test_states_that_decay_at_once() -> None:
    """A token may decay by more than a float can have, in either direction."""
    step = KimiStep(BATCHES["ragged"], layer_of(4, F32), rate=200.0)
    step.compare(step.run(Kernels()), step.token_by_token())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "spans", "head_dim", "size"),
    [
        (DeltaStep, BATCHES["decodes"], 16, 32),
        (DeltaStep, [(9, 10), (0, 3), (4, 71)], 24, 20),
        (KimiStep, BATCHES["decodes"], 16, 32),
        (KimiStep, [(9, 10), (0, 3), (4, 71), (0, 40)], 24, 40),
        (partial(KimiStep, rate=200.0), [(0, 40), (8, 48)], 16, 16),
    ],
)
def test_triton_equals_torch_for_the_gated_delta_rule(
    default_and_exact: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    kind: Callable[..., DeltaStep],
    spans: list[tuple[int, int]],
    head_dim: int,
    size: int,
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", head_dim)
    monkeypatch.setattr(sys.modules[__name__], "SIZE", size)
    step = kind(spans, layer_of(2 if kind is DeltaStep else HEADS, dtype), dtype)
    step.compare(step.run(default_and_exact, DEVICE), step.run(Kernels()))


def test_the_norm_of_heads_with_a_gate(triton_kernels: Kernels) -> None:
    x, gate, weight = (normal(*shape, seed=i) for i, shape in enumerate([(3, 96), (3, 104), (24,)]))
    gate = gate[:, :96]
    heads = x.double().unflatten(1, (4, 24))
    normed = heads / (heads.square().mean(2, keepdim=True) + 1e-5).sqrt() * weight.double()
    expected = normed.flatten(1) * F.silu(gate.double())
    close(Kernels().norm_gate(x, gate, weight, 1e-5), expected)
    x, gate, weight = (tensor.to(DEVICE) for tensor in (x, gate, weight))
    close(triton_kernels.norm_gate(x, gate, weight, 1e-5), expected)


def test_a_prompt_in_two_parts_ends_in_the_same_state(triton_kernels: Kernels) -> None:
    """At each number of tokens around the convolution's width and a chunk's length."""
    layer, length = layer_of(2, F32), 70
    whole = Step([(0, length)], layer)
    y, state = whole.run(Kernels())
    for cut in (1, 2, 3, 32, 33, 69):
        for kernels, device in ((Kernels(), "cpu"), (triton_kernels, DEVICE)):
            first, second = Step([(0, cut)], layer), Step([(cut, length)], layer)
            first.projected, second.projected = whole.projected[:cut], whole.projected[cut:]
            first_y, second.state = first.run(kernels, device)
            second_y, after = second.run(kernels, device)
            close(torch.cat((first_y, second_y)), y)
            slot = int(whole.slots)
            assert torch.equal(after.conv[slot], state.conv[slot])
            close(after.ssm[slot], state.ssm[slot])


def test_padding_of_a_graph_changes_nothing(default_and_exact: Kernels) -> None:
    """A graph has static work for more requests and chunks than a step has."""
    from baton.engine.kernels.state.mamba2 import scan_work
    from baton.engine.kernels.state.tiling import chunk_tokens

    step = Step([(4, 5), (0, 40), (3, 9)], layer_of(1, F32))
    expected = step.run(Kernels())
    plain = step.metadata(DEVICE)
    work = torch.from_numpy(scan_work(step.spans[1:], 1, chunk_tokens(F32))).to(DEVICE)
    contexts = plain.contexts.clone()
    contexts[1:] = 0
    padded = replace(plain, contexts=contexts, num_decodes=3, prefills=[], scans=F.pad(work, (0, 0, 0, 3)))
    step.metadata = lambda device: padded  # type: ignore[method-assign]
    step.compare(step.run(default_and_exact, DEVICE), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "groups"), [(96, 1), (128, 4)])
def test_gated_norm(triton_kernels: Kernels, dtype: torch.dtype, size: int, groups: int) -> None:
    x, gate, weight = (
        normal(*shape, seed=i).to(dtype) for i, shape in enumerate([(3, size), (3, size + 8), (size,)])
    )
    gate = gate[:, :size]
    x32, gated = x.double() * F.silu(gate.double()), []
    for part, scale in zip(x32.chunk(groups, 1), weight.double().chunk(groups), strict=True):
        gated.append(part / (part.square().mean(1, keepdim=True) + 1e-5).sqrt() * scale)
    expected = torch.cat(gated, dim=1)
    close(Kernels().gated_rms_norm(x, gate, weight, 1e-5, groups), expected)
    x, gate, weight = (tensor.to(DEVICE) for tensor in (x, gate, weight))
    close(triton_kernels.gated_rms_norm(x, gate, weight, 1e-5, groups), expected)


def test_the_norm_of_a_group_in_parts(triton_kernels: Kernels) -> None:
    """As ranks compute it that hold some columns of a group each."""
    x, gate, weight = (normal(*shape, seed=i) for i, shape in enumerate([(3, 96), (3, 96), (96,)]))
    expected = Kernels().gated_rms_norm(x, gate, weight, 1e-5, 1)
    for device, kernels in (("cpu", Kernels()), (DEVICE, triton_kernels)):
        parts = [[of.to(device).split((64, 32), -1)[i] for of in (x, gate, weight)] for i in range(2)]
        squares = torch.stack([kernels.gated_squares(x.contiguous(), gate) for x, gate, _ in parts])
        mean = (squares.sum(0)[:, None] / 96).repeat(1, 2)[:, 1]
        normed = [
            kernels.gated_rms_norm(x.contiguous(), gate, weight, 1e-5, 1, mean) for x, gate, weight in parts
        ]
        close(torch.cat(normed, dim=1), expected)
