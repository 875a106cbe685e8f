"""Mamba-2 (Dao & Gu 2024): parameters and state of a layer, and plain torch that defines it.

A layer computes this for the row of a token, which has the *channels* x, B and C, and Δ of each head:

    x, B, C = silu(convolution of the channels over the last `width` tokens)
    Δ       = softplus(Δ + bias), within limits
    state   = exp(Δ A) · state + Δ x ⊗ B
    y       = state · C + D x

Each head has a state [head_dim, state_size], and shares B and C with the other heads of its group. A request
that decodes takes this step (`update`). The tokens of a prompt are computed in chunks, which are products of
matrices (`scan`). With s_i = Δ_0 A + … + Δ_i A within a chunk:

    y_i   = exp(s_i) C_i · state + Σ_{j ≤ i} (C_i · B_j) exp(s_i − s_j) Δ_j x_j + D x_i
    state = exp(s_last) · state + Σ_j exp(s_last − s_j) Δ_j x_j ⊗ B_j

A request keeps its state in a slot. At its first position a request has no state: what the slot holds then is
not read, not even to multiply it by zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.attention.paged import AttentionMetadata

CHUNK = 64
"""Tokens of a chunk on a CPU."""


class LayerState(NamedTuple):
    """The state of one layer, for all slots."""

    conv: Tensor  # [slots, width − 1, channels]: the last inputs of the convolution
    ssm: Tensor  # [slots, heads, head_dim, state_size] in any dtype; `ShortConvolution` has state_size 0


class Prompt(NamedTuple):
    """The chunk of a prompt in a step."""

    slot: int
    fresh: bool
    """Whether the chunk begins at position 0."""
    rows: slice
    copies: Sequence[tuple[int, int]] = ()
    """(tokens, slot): the state after so many tokens of the chunk is copied to the slot. Ascending."""

    def pieces(self, tokens: int) -> Iterator[tuple[slice, int | None]]:
        """Cuts the chunk into pieces of at most `tokens` tokens. A piece also ends where a copy of the state
        is taken; the slot of that copy comes with it."""
        length, to = self.rows.stop - self.rows.start, dict(self.copies)
        ends = sorted({*range(tokens, length, tokens), *to, length})
        for start, stop in pairwise([0, *ends]):
            yield slice(start, stop), to.get(stop)


@dataclass(frozen=True, slots=True)
class TorchStateTiling:
    slots: Tensor  # [decodes] int64
    fresh: Tensor  # [decodes] bool: the request is at its first position
    prompts: list[Prompt]


Rates = Sequence[Tensor]
"""How fast a token changes the state, [tokens, heads] each: Δ, and β with a delta rule. `KimiDelta` has Δ
of each dimension of a key: [tokens, heads · state_size]. Rows are dense, at any stride."""


@dataclass(frozen=True, slots=True, eq=False)
class StateLayer:
    """The parameters of one layer between its two products: `HeadStates` or `ShortConvolution`."""

    activated: ClassVar[bool] = True
    """Whether silu follows the convolution."""

    conv_weight: Tensor  # [width, channels]
    conv_bias: Tensor | None  # [channels]

    def update(self, rows: Tensor, rates: Rates, state: Tensor, tiling: TorchStateTiling) -> Tensor:
        """The step of each request that decodes. rows [requests, channels] after the convolution. Returns y
        [requests, heads, head_dim] float32."""
        raise NotImplementedError

    def scan(self, rows: Tensor, rates: Rates, state: Tensor, prompt: Prompt) -> Tensor:
        """As `update`, for the tokens of a prompt, chunk by chunk. Returns y [tokens, heads, head_dim]."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class HeadStates(StateLayer):
    """Each head has a state: `Mamba2`, `GatedDelta` or `KimiDelta`."""

    dt_bias: Tensor  # [heads] float32
    a: Tensor  # [heads] float32, below 0
    groups: int
    """Each has one B and one C, or one key and one query."""


class ShortConvolution(StateLayer):
    """The convolution alone, of the channels x, without silu (LFM2). Heads have no state."""

    activated = False

    def update(self, rows: Tensor, rates: Rates, state: Tensor, tiling: TorchStateTiling) -> Tensor:
        return rows

    def scan(self, rows: Tensor, rates: Rates, state: Tensor, prompt: Prompt) -> Tensor:
        return rows


def tile_states(metadata: AttentionMetadata) -> TorchStateTiling:
    assert metadata.state_slots is not None, "each request of a model with states has a slot"
    decodes, slots = metadata.num_decodes, metadata.state_slots
    prompts, row, copies, of_prompts = [], decodes, {}, []
    if metadata.prefills:  # a GPU waits for these
        copies = {} if metadata.state_copies is None else nonzero(metadata.state_copies)
        of_prompts = slots[decodes:].tolist()
    for slot, (start, stop) in zip(of_prompts, metadata.prefills, strict=True):
        rows = range(row, row + stop - start)
        prompt_copies = [(at - row + 1, copies[at] - 1) for at in copies if at in rows]
        prompts.append(Prompt(slot, start == 0, slice(rows.start, rows.stop), prompt_copies))
        row = rows.stop
    return TorchStateTiling(slots[:decodes].long(), metadata.contexts[:decodes] == 1, prompts)


def scan_work(prefills: Sequence[tuple[int, int]], num_decodes: int, tokens: int) -> np.ndarray:
    """The chunks of state layers, [chunks, 6] int32: request (index into the slots), first row, number of
    tokens (at most `tokens`), number among the chunks of its request, tokens of the request from this chunk
    on, first position. `prefills` (start, stop) follow `num_decodes` requests of one row each.

    The first chunks of all requests come first. A program of a scan begins there and takes all chunks of its
    request."""
    chunks, row = [], num_decodes
    for request, (start, stop) in enumerate(prefills, num_decodes):
        chunks += [
            (request, row + at - start, min(tokens, stop - at), number, stop - at, at)
            for number, at in enumerate(range(start, stop, tokens))
        ]
        row += stop - start
    chunks.sort(key=lambda chunk: chunk[3])
    return np.array(chunks, dtype=np.int32).reshape(-1, 6)


def nonzero(values: Tensor) -> dict[int, int]:
    """By index, in ascending order."""
    return {index: int(values[index]) for index in values.nonzero()[:, 0].tolist()}


def mix_states(x: Tensor, rates: Rates, layer: StateLayer, state: LayerState, tiling: Any) -> Tensor:
    """Convolution and scan of a state layer: takes the state of each request in the tiling past the tokens of
    this step, in place.

    x [tokens, channels], dense rows at any stride. Returns y [tokens, heads · head_dim]."""
    decodes = len(tiling.slots)
    y = x.new_empty(len(x), state.ssm.shape[1] * state.ssm.shape[2])
    if decodes:
        rows = convolve_next(x[:decodes], layer, state.conv, tiling)
        of_rows = [part[:decodes] for part in rates]
        y[:decodes] = layer.update(rows, of_rows, state.ssm, tiling).flatten(1)
    for prompt in tiling.prompts:
        rows = convolve(x[prompt.rows], layer, state.conv, prompt)
        of_rows = [part[prompt.rows] for part in rates]
        y[prompt.rows] = layer.scan(rows, of_rows, state.ssm, prompt).flatten(1)
    return y


def mix_states_by_row(x: Tensor, rates: Rates, layer: StateLayer, state: LayerState, tiling: Any) -> Tensor:
    """As `mix_states`, with the same bits for a row whatever the other rows: each row is a decode by itself,
    also those of prompts."""
    decodes = zip(tiling.slots.tolist(), tiling.fresh.tolist(), strict=True)
    spans = [Prompt(slot, fresh, slice(i, i + 1)) for i, (slot, fresh) in enumerate(decodes)]
    y = x.new_empty(len(x), state.ssm.shape[1] * state.ssm.shape[2])
    for prompt in (*spans, *tiling.prompts):
        slot, copies = torch.tensor([prompt.slot]), dict(prompt.copies)
        for count, row in enumerate(range(prompt.rows.start, prompt.rows.stop), 1):
            alone = TorchStateTiling(slot, torch.tensor([prompt.fresh and count == 1]), [])
            at = slice(row, row + 1)
            y[row] = mix_states(x[at], [part[at] for part in rates], layer, state, alone)[0]
            if count in copies:
                for part in state:
                    part[copies[count]] = part[prompt.slot]
    return y


def convolve(x: Tensor, layer: StateLayer, state: Tensor, prompt: Prompt) -> Tensor:
    """The convolution of the tokens of a prompt: x [tokens, channels] → the same. Keeps the last inputs in
    `state`, as in `LayerState`."""
    width, tokens = len(layer.conv_weight), len(x)
    before = torch.zeros_like(state[0]) if prompt.fresh else state[prompt.slot]
    inputs = torch.cat((before, x))
    state[prompt.slot] = inputs[tokens:]
    for end, slot in prompt.copies:
        state[slot] = inputs[end : end + width - 1]
    exact, weight = inputs.float(), layer.conv_weight.float()
    total = exact[:tokens] * weight[0]
    for i in range(1, width):
        total.addcmul_(exact[i : i + tokens], weight[i])
    return _activated(total, layer).to(x.dtype)


def convolve_next(x: Tensor, layer: StateLayer, state: Tensor, tiling: TorchStateTiling) -> Tensor:
    """As `convolve`, for one token of each request that decodes: x [requests, channels]."""
    before = state[tiling.slots].masked_fill_(tiling.fresh[:, None, None], 0)
    inputs = torch.cat((before, x[:, None]), dim=1)
    state[tiling.slots] = inputs[:, 1:]
    return _activated((inputs.float() * layer.conv_weight.float()).sum(dim=1), layer).to(x.dtype)


def _activated(total: Tensor, layer: StateLayer) -> Tensor:
    total = total if layer.conv_bias is None else total + layer.conv_bias.float()
    return F.silu(total) if layer.activated else total


def in_float32(rows: Tensor, groups: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, groups, heads of a group, head_dim], B and C [rows, groups, state_size]."""
    _, heads, head_dim, size = state.shape
    x, b, c = rows.float().split((heads * head_dim, groups * size, groups * size), dim=1)
    of_group = (groups, size)
    return x.unflatten(1, (groups, -1, head_dim)), b.unflatten(1, of_group), c.unflatten(1, of_group)


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2(HeadStates):
    d: Tensor  # [heads] float32
    dt_limits: tuple[float, float]

    def update(self, rows: Tensor, rates: Rates, state: Tensor, tiling: TorchStateTiling) -> Tensor:
        x, b, c = in_float32(rows, self.groups, state)
        x = x.flatten(1, 2)
        shared = state.shape[1] // self.groups
        b, c = (of_groups.repeat_interleave(shared, dim=1) for of_groups in (b, c))
        step = self._time_steps(rates)
        before = state[tiling.slots].float().masked_fill_(tiling.fresh[:, None, None, None], 0)
        decayed = before.mul_((step * self.a).exp()[:, :, None, None])
        after = decayed.addcmul_((x * step[:, :, None])[..., None], b[:, :, None])
        state[tiling.slots] = after.to(state.dtype)
        return (after @ c[..., None])[..., 0].addcmul_(x, self.d[:, None])

    def scan(self, rows: Tensor, rates: Rates, state: Tensor, prompt: Prompt) -> Tensor:
        x, b, c = (
            part.transpose(0, 1) for part in in_float32(rows, self.groups, state)
        )  # [groups, tokens, …]
        step = (
            self._time_steps(rates).unflatten(1, (self.groups, -1)).transpose(0, 1)
        )  # [groups, tokens, shared]
        decay = step * self.a.view(self.groups, 1, -1)
        of_groups = self.groups, -1, state.shape[3]
        kept = state[prompt.slot].view(of_groups)  # [groups, shared · head_dim, state_size]
        before = kept.to(torch.float32, copy=True)
        if prompt.fresh:
            before.zero_()
        y = torch.empty_like(x)
        later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu_(1)
        for at, copy in prompt.pieces(CHUNK):
            total = decay[:, at].cumsum(dim=1)
            size = total.shape[1]
            moved = x[:, at] * step[:, at, :, None]
            sums = total.mT  # [groups, shared, tokens]
            decays = (sums[..., None] - sums[:, :, None]).masked_fill_(later[:size, :size], float("-inf"))
            scores = decays.exp_().mul_((c[:, at] @ b[:, at].mT)[:, None])
            y[:, at] = (scores @ moved.transpose(1, 2)).transpose(1, 2)
            y[:, at] += (c[:, at] @ before.mT).unflatten(2, moved.shape[2:]).mul_(total.exp()[..., None])
            decay_to_end = (total[:, -1:] - total).exp_()
            before.unflatten(1, moved.shape[2:]).mul_(total[:, -1].exp()[..., None, None])
            before += moved.mul_(decay_to_end[..., None]).flatten(2).mT @ b[:, at]
            if copy is not None:
                state[copy].view(of_groups).copy_(before)
        kept.copy_(before)
        return y.addcmul_(x, self.d.view(self.groups, 1, -1, 1)).transpose(0, 1).flatten(1, 2)

    def _time_steps(self, rates: Rates) -> Tensor:
        (dt,) = rates
        return F.softplus(dt.float() + self.dt_bias).clamp_(*self.dt_limits)


def gated_squares(x: Tensor, gate: Tensor) -> Tensor:
    """The sum of the squares of x · silu(gate), [rows] float32. x and gate as in `gated_rms_norm`."""
    return (x.float() * F.silu(gate.float())).square().sum(dim=1)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, squares: Tensor | None = None
) -> Tensor:
    """The RMSNorm of x · silu(gate), times weight. x [rows, size]; gate too, with rows at any stride. Each of
    the `groups` parts of a row has a norm of its own.

    squares [rows] float32, at any stride: x is a part of one group, with this mean of squares."""
    gated = (x.float() * F.silu(gate.float())).unflatten(1, (groups, -1))
    if squares is None:
        normed = F.rms_norm(gated, gated.shape[2:], eps=eps)
    else:
        normed = gated * (squares[:, None, None] + eps).rsqrt()
    return (normed.flatten(1) * weight.float()).to(x.dtype)
