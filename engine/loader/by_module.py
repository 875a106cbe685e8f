"""Matrices of one checkpoint in several formats: which settings hold for which module.

Settings say which format a module has, and its tensors say whether it has it. Where both differ, a matrix
could be read with wrong settings, so this is refused. A product of matrices in several formats is computed in
the model's dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import FourBits, Fp8Experts, LinearMethod
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import OUTPUT, PlainFormat, Stack, Weights
from baton.engine.model_config import ModelConfig

PLAIN = PlainFormat()
Chosen = Callable[[str], PlainFormat | None]
"""The format of a module by its name. None: it is plain."""


class Dequantized(PlainFormat):
    """The base of formats that read matrices by `values`: what has no packed product is dequantized."""

    def linear(self, weights: Weights, stack: Stack) -> LinearMethod:
        return PlainLinear(self.dense(weights, stack), weights.bias(stack), exact=weights.kernels.exact)

    def experts(self, weights: Weights, experts: Sequence[Stack]) -> Tensor | Fp8Experts | FourBits:
        held = [self.dense(weights, stack) for stack in experts]
        return torch.stack([values for values in held if len(values)])

    def dense(self, weights: Weights, stack: Stack) -> Tensor:
        parts = zip(stack.names, stack.rows, strict=True)
        values = [self.values(weights, name, rows, stack.columns) for name, rows in parts]
        return torch.cat(values).to(weights.dtype)


@dataclass(frozen=True, kw_only=True)
class ByModule(Dequantized):
    formats: tuple[PlainFormat, ...]
    """All that a module may have."""
    chosen: Chosen
    source: str
    extra_biases: bool = False
    """Whether a checkpoint may have biases that the model lacks, as those of AutoGPTQ. Those of experts must
    be 0."""
    parameters: Mapping[tuple[int, bool], int] = field(default_factory=dict, compare=False, repr=False)
    """As `Weights.kept`. Empty: sizes count all matrices in the format that takes the most."""

    def bytes_per_parameter(
        self, dtype: torch.dtype, *, output: bool = False, experts: bool = False
    ) -> float:
        return max(each.bytes_per_parameter(dtype, output=output, experts=experts) for each in self.formats)

    def matrix_bytes(self, model: ModelConfig, dtype: torch.dtype) -> float:
        if not self.parameters:
            return super().matrix_bytes(model, dtype)
        total = (model.matrix_parameters - sum(self.parameters.values())) * dtype.itemsize
        for (place, experts), number in self.parameters.items():
            total += number * self.formats[place].bytes_per_parameter(dtype, experts=experts)
        return total / model.matrix_parameters

    def with_int8_dequantized(self) -> PlainFormat:
        changed = {each.name: each.with_int8_dequantized() for each in self.formats}
        if all(each is changed[each.name] for each in self.formats):
            return self

        def of(name: str) -> PlainFormat | None:
            found = self.chosen(name)
            return None if found is None else changed[found.name]

        names = "; ".join(each.name for each in changed.values())
        return replace(self, name=names, formats=tuple(changed.values()), chosen=of)

    def reads(self, weights: Weights, name: str) -> bool:
        return self._of(weights, name) is not PLAIN

    def alike(self, weights: Weights, names: Sequence[str]) -> bool:
        return len({self._of(weights, name) is PLAIN for name in names}) == 1

    def linear(self, weights: Weights, stack: Stack) -> LinearMethod:
        biased = [self.extra_biases and weights.has(f"{name}.bias") for name in stack.names]
        stack = stack._replace(bias=stack.bias or all(biased))
        if (alone := self._alone(weights, [stack])) is not None and all(biased) == any(biased):
            if stack.names != [OUTPUT]:
                self._count(weights, alone, [stack])
            return alone.linear(weights, stack)
        some = any(biased) and not all(biased)  # of a quantized and a plain matrix
        biases = self._biases(weights, stack, biased) if some else weights.bias(stack)
        return PlainLinear(self._values(weights, stack), biases, exact=weights.kernels.exact)

    @staticmethod
    def _biases(weights: Weights, stack: Stack, biased: Sequence[bool]) -> Tensor | None:
        """With zeros for matrices that have none."""
        found = []
        for name, rows, has in zip(stack.names, stack.rows, biased, strict=True):
            one = weights.bias(Stack([name], [rows], stack.columns, bias=True)) if has else None
            empty = torch.zeros(rows.length, dtype=weights.dtype, device=weights.device)
            found.append(empty if one is None else one)
        return None if stack.columns.start else torch.cat(found)

    def experts(self, weights: Weights, experts: Sequence[Stack]) -> Tensor | Fp8Experts | FourBits:
        alone = self._alone(weights, experts)
        if alone is None:
            return super().experts(weights, experts)
        for stack in experts:
            self._leave_biases(weights, stack)
        self._count(weights, alone, experts, experts=True)
        return alone.experts(weights, experts)

    def _count(
        self, weights: Weights, kept: PlainFormat, stacks: Sequence[Stack], *, experts: bool = False
    ) -> None:
        if kept is not PLAIN:
            number = sum(rows.length * stack.columns.length for stack in stacks for rows in stack.rows)
            weights.kept[self.formats.index(kept), experts] += number

    def dense(self, weights: Weights, stack: Stack) -> Tensor:
        self._leave_biases(weights, stack)
        return self._values(weights, stack)

    def _leave_biases(self, weights: Weights, stack: Stack) -> None:
        """Raises `ValueError` for a bias that would change a product, of matrices that have none."""
        for name, rows in zip(stack.names, stack.rows, strict=True):
            if self.extra_biases and weights.has(f"{name}.bias"):
                bias = weights.stack([f"{name}.bias"], [(rows,)])
                if not bias.is_meta and bias.any():
                    raise ValueError(f"{self.source}: {name}.bias is not 0, and the model has no such bias")

    def _values(self, weights: Weights, stack: Stack) -> Tensor:
        alone = self._alone(weights, [stack])
        return (super() if alone is None else alone).dense(weights, stack)

    def values(self, weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
        return self._of(weights, name).values(weights, name, rows, columns)

    def _alone(self, weights: Weights, stacks: Sequence[Stack]) -> PlainFormat | None:
        """The format of all matrices. None: they have several."""
        found = [self._of(weights, name) for stack in stacks for name in stack.names]
        return found[0] if all(each is found[0] for each in found) else None

    def _of(self, weights: Weights, name: str) -> PlainFormat:
        chosen = self.chosen(name)
        if chosen is not None and chosen.reads(weights, name):
            return chosen
        stored = next((each for each in self.formats if each.reads(weights, name)), None)
        if stored is not None:
            named = "plain" if chosen is None else chosen.name
            raise ValueError(
                f"{self.source}: quantization_config: {name} is {named} by these settings, but has tensors "
                f"of {stored.name}; correct the settings of this module"
            )
        return PLAIN


def by_module(
    formats: Sequence[PlainFormat], chosen: Chosen, source: str, *, extra_biases: bool = False
) -> ByModule:
    """`formats` may repeat some. `chosen` returns one of them."""
    different = tuple({each.name: each for each in formats}.values())
    named = {each.name: each for each in different}

    def of(name: str) -> PlainFormat | None:
        found = chosen(name)
        return None if found is None else named[found.name]

    return ByModule(
        name="; ".join(each.name for each in different),
        identity="; ".join(each.identity for each in different),
        formats=different,
        chosen=of,
        source=source,
        extra_biases=extra_biases,
    )


def require(settings: Mapping[str, Any], source: str, **allowed: tuple[Any, ...]) -> None:
    """Raises `ValueError` naming a setting that has none of these values."""
    for key, values in allowed.items():
        value = settings.get(key)
        if value not in values or (isinstance(value, bool) and not any(value is each for each in values)):
            raise ValueError(
                f"{source}: quantization_config: {key} {value!r} is not supported "
                f"({', '.join(str(value) for value in values if value is not None)} is)"
            )
