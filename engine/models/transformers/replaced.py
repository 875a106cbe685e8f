"""Parts of Baton in place of common modules: products, norms and experts.

Products of one input are computed as one. Whether another module is a norm or a mixture of experts as Baton
computes it, its results say: for each class the first module and its replacement compute the same input. A
class whose results differ stays as it is.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from baton.engine.kernels import Kernels, LinearMethod
from baton.engine.kernels.moe.experts import Choice, Experts
from baton.engine.layers.current_step import CurrentStep, computing, current_step
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.ranks import unsharded
from baton.engine.layers.weights import Stack, Weights
from baton.engine.model_config import Scoring
from baton.engine.models.transformers.interface import ERRORS, SERVING

ONE_INPUT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of linear modules beside each other that are computed as one."""
CLOSE = {torch.float32: 1e-4}
"""Largest difference of results, by their norm. Smaller types round in other places."""
CLOSE_OF_OTHERS = 0.02
ROWS = 32
"""Of the input that a module and its replacement compute."""
LEAST_LOGIT = -1e30
LEAST_WEIGHT = 1e-30
"""Of an expert: a smaller one adds nothing in float32."""


class Product:
    """Linear modules of one input, as one product."""

    def __init__(self, product: LinearMethod, sizes: Sequence[int]) -> None:
        self.product = product
        self.sizes = list(sizes)
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def part(self, x: Tensor, index: int) -> Tensor:
        if x is not self.input or index not in self.parts:
            out = self.product(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)
            self.input, self.parts = x, dict(enumerate(out.split(self.sizes, dim=-1)))
        part = self.parts.pop(index)
        if not self.parts:  # nothing keeps the memory
            self.input = None
        return part


class Linear(nn.Module):
    """One of the linear modules of a product."""

    def __init__(self, product: Product, index: int, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.product, self.index, self.shape, self.dtype = product, index, shape, dtype

    @property
    def weight(self) -> Tensor:
        """Without values: modules read its type. A product with it raises an error."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(x, self.index)


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.scale, self.eps, self.kernels = weight, eps, kernels

    @property
    def weight(self) -> Tensor:
        """As of `Linear`."""
        return torch.empty_like(self.scale, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.kernels.add_rms_norm(rows, None, self.scale, self.eps).view(x.shape)


class Router(nn.Module):
    """Gives the logits themselves in place of weights: the kernels of experts choose by them."""

    def __init__(self, product: LinearMethod) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.product(x.reshape(-1, x.shape[-1]).contiguous())
        return logits, logits, logits


class Mixture(NamedTuple):
    """The experts of a module."""

    experts: Experts
    kernels: Kernels
    by_logits: bool
    """A `Router` stands before them."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        count, experts, logits, total = len(self.experts.down), self.experts, weights, None
        if not self.by_logits:  # logits whose softmax over the chosen ones has these weights
            experts = replace(experts, choice=Choice(chosen.shape[-1], Scoring.NORMALIZED_SOFTMAX))
            total = weights.float().sum(-1, keepdim=True)
            logits = torch.full((len(x), count), LEAST_LOGIT, device=x.device)
            logits.scatter_(1, chosen, weights.float().clamp_min(LEAST_WEIGHT).log())
        counts = torch.zeros(count, dtype=torch.int32, device=x.device)
        y = self.kernels.mix_experts(x.contiguous(), logits, experts, counts, slots=current_step().slots)
        return y if total is None else (y * total).to(y.dtype)


def compute_experts(module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts of a module: x [tokens, size], chosen and weights [tokens, experts of a token]."""
    mixture = getattr(module, "mixture", None)
    if mixture is not None:
        return mixture(x, chosen, weights)
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward(module, x, chosen, weights)


def linears(whole: Any, weights: Weights, left: Collection[str]) -> set[str]:
    """Replaces linear modules but those that are `left`. Returns their names."""
    taken, done = dict[str, nn.Linear](), set[str]()
    for name, module in whole.named_modules():
        if type(module) is nn.Linear and name not in left:
            taken[name] = module
    for name in taken:
        if name in done:
            continue
        parent, _, child = name.rpartition(".")
        beside = next((each for each in ONE_INPUT if child in each), (child,))
        names = [f"{parent}.{each}".removeprefix(".") for each in beside]
        if not _alike(names, taken, weights):
            names = [name]
        modules = [taken[each] for each in names]
        rows, columns = [unsharded(len(each.weight)) for each in modules], modules[0].weight.shape[1]
        product = weights.linear(names, rows, unsharded(columns), bias=modules[0].bias is not None)
        of_all = Product(product, [len(each.weight) for each in modules])
        for index, (each, module) in enumerate(zip(names, modules, strict=True)):
            whole.set_submodule(each, Linear(of_all, index, module.weight.shape, weights.dtype))
        done.update(names)
    return done


def _alike(names: Sequence[str], taken: Mapping[str, nn.Linear], weights: Weights) -> bool:
    if not all(name in taken for name in names):
        return False
    forms = {(taken[name].weight.shape[1], taken[name].bias is None) for name in names}
    return len(forms) == 1 and weights.format.alike(weights, names)


def norms(whole: Any, weights: Weights, left: Collection[str]) -> None:
    """Replaces norms but those that are `left`."""
    tried: dict[tuple[type, torch.Size], float | None] = {}
    for name, module in list(whole.named_modules()):
        scale, eps = getattr(module, "weight", None), _eps(module)
        if name in left or "Norm" not in type(module).__name__ or eps is None:
            continue
        if not isinstance(scale, Tensor) or scale.dim() != 1 or sum(1 for _ in module.parameters()) != 1:
            continue
        key = type(module), scale.shape
        if key not in tried:
            tried[key] = _added(module, scale.data, eps, weights)
        if (more := tried[key]) is not None:
            whole.set_submodule(name, Norm(scale.data + more, eps, weights.kernels))


def _added(module: nn.Module, scale: Tensor, eps: float, weights: Weights) -> float | None:
    """What is added to the scale of an RMSNorm: some multiply by 1 + weight. None: it computes something
    else, or takes more than the hidden state."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    x = _random(scale.shape, scale)
    expected = module(x)
    made = ((added, Norm(scale + added, eps, weights.kernels)(x)) for added in (0.0, 1.0))
    return next((added for added, y in made if _same(expected, y)), None)


def _eps(module: nn.Module) -> float | None:
    found = [getattr(module, name, None) for name in ("variance_epsilon", "eps")]
    return next((eps for eps in found if isinstance(eps, float)), None)


def mixtures(whole: Any, weights: Weights) -> None:
    """Gives experts to Baton's kernels. Replaces their routers where these choose as the kernels do."""
    tried: dict[type, tuple[Scoring | None, ...]] = {}
    for block in list(whole.modules()):
        experts = getattr(block, "experts", None)
        if isinstance(experts, nn.Module) and in_one_form(experts):
            if type(block) not in tried:
                tried[type(block)] = _way(whole, block, experts, weights)
            for scoring in tried[type(block)]:
                _replace(block, experts, scoring, weights)


def in_one_form(experts: nn.Module) -> bool:
    """[experts, gate and up, size] and [experts, size, inner], without biases."""
    wanted = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    wanted |= {"has_post_expert_norm": False}
    names = {name for name, _ in experts.named_parameters()}
    return names == {"gate_up_proj", "down_proj"} and all(
        getattr(experts, name, value) is value for name, value in wanted.items()
    )


def dequantized(whole: Any, weights: Weights) -> set[str]:
    """Gives experts that a checkpoint has one by one, in the format of its other matrices, their values in
    the model's dtype. Returns the names of their parameters."""
    done, size = set[str](), unsharded
    for name, experts in list(whole.named_modules()):
        if not in_one_form(experts) or weights.has(f"{name}.gate_up_proj"):
            continue
        count, hidden, inner = experts.down_proj.shape
        ways = {
            "gate_up_proj": (("gate_proj", "up_proj"), [size(inner)] * 2, size(hidden)),
            "down_proj": (("down_proj",), [size(hidden)], size(inner)),
        }
        for parameter, (parts, rows, columns) in ways.items():
            shape = getattr(experts, parameter).shape
            values = torch.empty(shape, dtype=weights.dtype, device=weights.device)
            for expert in range(count):
                stack = Stack([f"{name}.{expert}.{part}" for part in parts], rows, columns)
                values[expert] = weights.format.dense(weights, stack)
            setattr(experts, parameter, nn.Parameter(values, requires_grad=False))
            done.add(f"{name}.{parameter}")
    return done


def _way(whole: Any, block: nn.Module, experts: Any, weights: Weights) -> tuple[Scoring | None, ...]:
    """How a router of Baton scores as this block does; None: its own router stays. Empty: its experts do not
    compute as Baton's."""
    x, router = _random(experts.down_proj.shape[1:2], experts.down_proj)[None], None
    if _is_router(getattr(block, "gate", None)):
        router = block.get_submodule("gate")
    ways: list[Scoring | None] = [Scoring.NORMALIZED_SOFTMAX, Scoring.SOFTMAX] if router else []
    try:
        whole.set_experts_implementation("eager")
        expected = _first(block(x))
    except ERRORS:  # it takes more than the hidden state
        return ()
    finally:
        whole.set_experts_implementation(SERVING)
    for scoring in (*ways, None):
        _replace(block, experts, scoring, weights)
        try:
            with computing(CurrentStep(0)):
                fits = _same(expected, _first(block(x)))
        except ERRORS:  # its router takes more than the hidden state
            fits = False
        if router is not None:
            block.set_submodule("gate", router)
        if fits:
            return (scoring,)
    del experts.mixture
    return ()


def _is_router(router: Any) -> bool:
    if not isinstance(router, nn.Module) or not isinstance(getattr(router, "top_k", None), int):
        return False
    return {name for name, _ in (*router.named_parameters(), *router.named_buffers())} == {"weight"}


def _replace(block: Any, experts: Any, scoring: Scoring | None, weights: Weights) -> None:
    choice = Choice(1, Scoring.NORMALIZED_SOFTMAX)
    if scoring is not None:
        choice = Choice(block.gate.top_k, scoring)
        product = PlainLinear(block.gate.weight.data, exact=weights.kernels.exact)
        block.set_submodule("gate", Router(product))
    matrices = Experts(experts.gate_up_proj.data, experts.down_proj.data, choice)
    experts.mixture = Mixture(matrices, weights.kernels, scoring is not None)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _random(size: Sequence[int], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, *size, generator=generator).to(like.device, like.dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    close = CLOSE.get(one.dtype, CLOSE_OF_OTHERS)
    return bool((one.float() - other.float()).norm() <= close * one.float().norm())
