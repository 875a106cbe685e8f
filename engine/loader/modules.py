"""Checkpoints of models that transformers' modules compute: their configuration, and their tensors by the
names that the modules have.

transformers' own conversions say what each stored tensor becomes: another name, or a part of a tensor of the
modules. The experts of a layer become one tensor, for example.
"""

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Checkpoint
from baton.engine.loader.families import what_serves
from baton.engine.loader.rearranged import Files
from baton.engine.loader.settings import Settings
from baton.engine.model_config import ModelConfig, ModuleAttention, ModulesConfig
from baton.engine.models.transformers.interface import ERRORS, words_of
from baton.engine.models.transformers.model import modules_of
from baton.engine.models.transformers.modules import (
    LeftOut,
    modules_class,
    on_meta,
    read_settings,
    record_calls,
    text_of,
)
from baton.engine.models.transformers.replaced import in_one_form
from baton.engine.models.vision import TOWER

LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
QUANTIZED_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.(?!(?:weight|bias)$)\w+")
"""A tensor of a matrix of an expert that no plain one has, such as a scale."""
PROJECTIONS = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""Other names of an expert's matrices."""
OF_LENGTH = ("dynamic", "longrope")
"""Rotations that change with the longest position of a step. Cached keys would have several."""


def has_modules(values: Mapping[str, Any], source: str) -> bool:
    """Whether transformers is installed and has a class for a parsed `config.json`."""
    try:
        modules_class(Settings(values, source).architecture, str(values.get("model_type", "")))
    except ValueError:
        return False
    return True


def modules_config(values: Mapping[str, Any], eos_ids: Sequence[int], source: str) -> ModelConfig:
    """The configuration from a parsed `config.json`. Raises `ValueError` naming `source` and what is not
    supported."""
    architecture = Settings(values, source).architecture
    plain = {name: value for name, value in values.items() if name != "quantization_config"}
    try:
        settings = json.dumps(read_settings(plain), sort_keys=True)
        if kinds := [kind for kind in rope_types(text_of(json.loads(settings))) if kind in OF_LENGTH]:
            raise ValueError(f"rope scaling {kinds[0]!r} is not supported")
        layers, read_alone = record_calls(settings)
    except ERRORS as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(
            f"{source}: {architecture} cannot be served by modules of transformers: {kind}{words_of(error)}"
            f"{what_serves(architecture)}"
        ) from error
    text = text_of(json.loads(settings))
    whole = on_meta(settings)
    named = whole.config.get_text_config()  # some have other names in files
    names = "hidden_size", "max_position_embeddings", "tie_word_embeddings", "vocab_size"
    read = Settings({**text, **{name: getattr(named, name, None) for name in names}}, source)
    matrices = sum(x.numel() for x in whole.parameters() if x.dim() > 1)
    output = whole.get_output_embeddings()
    linear = sum(
        module.weight.numel()
        for name, module in whole.named_modules()
        if type(module) is nn.Linear and module is not output and name not in read_alone
    )
    context = read.integer("max_position_embeddings", 2048)
    attention = [layer for layer in layers if isinstance(layer, ModuleAttention)]
    spans = tuple(layer.span if isinstance(layer, ModuleAttention) else None for layer in layers)
    shape = ModelConfig(
        architecture=architecture,
        num_layers=len(layers),
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("hidden_size"),
        num_heads=attention[0].num_heads,
        num_kv_heads=attention[0].num_kv_heads,
        head_dim=attention[0].head_dim,
        vocab_size=read.integer("vocab_size"),
        max_model_len=context,
        rms_norm_eps=0.0,
        rope_theta=1.0,
        rope_scaling=None,
        tie_embeddings=bool(read.get("tie_word_embeddings")),
        attention_bias=False,
        eos_ids=tuple(eos_ids),
        dtype=json.loads(settings).get("dtype") or text.get("dtype"),
        quantization=values.get("quantization_config") or None,
        spans=spans if any(span and span.length < context for span in spans) else (),
        modules=ModulesConfig(settings, layers, matrices, linear, frozenset(read_alone)),
    )
    shape.check(source)
    return shape


def rope_types(settings: Mapping[str, Any]) -> list[str]:
    """Those of all types of layers."""
    rope = settings.get("rope_parameters") or {}
    each = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    return [str(part["rope_type"]) for part in each if part.get("rope_type")]


class ModulesCheckpoint(Checkpoint):
    """The tensors of `files` as the modules have them."""

    def __init__(self, files: Files) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        self.config, self.source, self.copies = files.config, files.source, files.copies
        self._files = files
        self._model = model = on_meta(modules_of(files.config).settings)
        self._state = state = model.state_dict()
        mapping = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._converter_of = {source: each for each in converters for source in each.source_patterns}
        self._stored: dict[str, str] = {}
        """Tensors that only have another name there."""
        self._made_of: dict[str, list[tuple[str, str]]] = {}
        """By the first tensor that a conversion makes: the stored ones, each with its pattern."""
        self._made_with: dict[str, str] = {}
        """Of each tensor that a conversion makes, the first one."""
        self._last: tuple[str, Mapping[str, Any]] = "", {}
        prefix = model.base_model_prefix
        left_out = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, LeftOut))
        encoder = left_out[0] if len(left_out) == 1 else f"{prefix}."  # begins all names of its tensors
        found = map(QUANTIZED_EXPERT.match, files.names() if files.config.quantization else ())
        quantized = {match[1] for match in found if match}
        of_parts = dict(model.named_modules())
        for stored in sorted(files.names(), key=dot_natural_key):
            experts = stored.partition(".experts.")[0] + ".experts"
            if experts in quantized:  # the format reads each expert by itself
                name, _ = rename_source_key(stored, renamings, [], prefix, state)
                for other, common in PROJECTIONS.items():
                    name = name.replace(other, common)
                part = of_parts.get(name.partition(".experts.")[0] + ".experts")
                if part is not None and in_one_form(part):
                    self._stored[name] = stored
                elif not (name.startswith(left_out) or self._is_further(name)):
                    raise ValueError(
                        f"{files.file_of(stored)}: quantized experts of {self.config.architecture} are not "
                        f"supported, such as {stored}"
                    )
                continue
            name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
            if name not in state:
                plain, _ = rename_source_key(stored, [], [], prefix, state)
                name, pattern = (plain, None) if plain in state else (name, pattern)
            if name in state and pattern is not None:
                self._made_of.setdefault(name, []).append((pattern, stored))
                for target in (targets := self._converter_of[pattern].target_patterns):
                    self._made_with[name.replace(targets[0], target)] = name
            elif name.startswith(left_out):
                if files.config.vision is not None:
                    self._stored[TOWER + name.removeprefix(encoder)] = stored
            elif name in state or not self._is_further(name):
                self._stored[name] = stored

    def _is_further(self, name: str) -> bool:
        """Whether the tensor belongs to a layer behind those of the modules. It predicts further tokens."""
        layer = LAYER.match(name)
        return layer is not None and not any(other.startswith(layer[0]) for other in self._state)

    def names(self) -> Collection[str]:
        return self._stored.keys() | self._made_with.keys()

    def file_of(self, name: str) -> str:
        if name in self._made_with:
            return self._files.file_of(self._made_of[self._made_with[name]][0][1])
        return self._files.file_of(self._stored.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._made_with:
            return tuple(self._state[name].shape)
        return self._files.shape(self._stored[name])

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        if name in self._made_with:
            return self._made(name)[tuple(part.indices for part in parts)]
        return self._files.read(self._stored[name], parts)

    def _made(self, name: str) -> Tensor:
        first = self._made_with[name]
        if self._last[0] != first:
            self._last = "", {}
            sources = self._made_of[first]
            converter = copy.deepcopy(self._converter_of[sources[0][0]])
            for pattern, stored in sources:
                add: Any = converter.add_tensor  # it takes what makes a tensor, too
                add(first, stored, pattern, partial(self._whole, stored))
            try:
                made = converter.convert(first, model=self._model, config=self._model.config)
            except (RuntimeError, KeyError, IndexError) as error:
                raise ValueError(
                    f"{self.file_of(name)}: {len(sources)} tensors do not make {name}, such as "
                    f"{sources[0][1]}: {error}"
                ) from error
            self._last = first, made
        tensor = self._last[1][name]
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        if tensor.shape != self._state[name].shape:
            raise ValueError(f"{self.file_of(name)}: the tensors of {name} make {list(tensor.shape)}")
        return tensor

    def _whole(self, stored: str) -> Tensor:
        return self._files.read(stored, [unsharded(size) for size in self._files.shape(stored)])
