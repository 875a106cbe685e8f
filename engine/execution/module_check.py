"""Checks at a start that transformers' modules compute with Baton's attention what they compute without.

The same classes at reduced widths, with as many layers as show each kind, random weights and windows of a few
tokens: a prompt in two cuts, and then beside another one, against one pass of transformers itself.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from baton.engine.execution.layer_attention import LayerAttention, attention_shapes
from baton.engine.execution.layer_caches import LayerCaches
from baton.engine.kernels import Kernels
from baton.engine.kernels.attention.paged import AttentionMetadata
from baton.engine.layers.current_step import CurrentStep, computing
from baton.engine.layers.ranks import Ranks, Shard
from baton.engine.layers.weights import Checkpoint, PlainFormat, Weights
from baton.engine.loader.modules import modules_config
from baton.engine.model_config import ModelConfig, ModuleAttention, ModuleIndex, ModuleStates
from baton.engine.models.transformers.interface import ERRORS, words_of
from baton.engine.models.transformers.model import ModulesModel, modules_of
from baton.engine.models.transformers.modules import on_meta, text_of, with_values

PROMPT, CUT, SHORT, BLOCK = 29, 11, 7, 16
"""Tokens of the prompt, of its first cut, of the prompt beside it, and of a block of the cache."""
CLOSE = 1e-3
"""Largest difference of logits, by the largest logit. Rounding makes some 1e-5."""
MOST_PARAMETERS = 200_000_000
LENGTHS = {
    "attention_chunk_size": 8, "floor_scale": 4, "index_topk": 8, "original_max_position_embeddings": 8,
    "sliding_window": 8,
}  # fmt: skip
"""Settings after whose number of tokens something changes."""
WIDTHS = {
    "attention_head_dim": 32, "attention_hidden_size": 128, "head_dim": 16, "hidden_size": 64,
    "intermediate_size": 48, "kv_lora_rank": 32, "linear_head_dim": 16, "linear_key_head_dim": 16,
    "linear_num_heads": 4, "linear_value_head_dim": 16, "mamba_d_state": 16, "mamba_headdim": 16,
    "moe_intermediate_size": 24, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "shared_expert_intermediate_size": 24, "swa_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
MANY = {
    "n_routed_experts": 32, "num_experts": 32, "num_local_experts": 32, "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
}  # fmt: skip


class MadeWeights(Checkpoint):
    """Tensors in memory."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config, self.source, self._tensors = config, "reduced weights", tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def file_of(self, name: str) -> str:
        return self.source

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        return self._tensors[name][tuple(part.indices for part in parts)]


def check_modules(config: ModelConfig, source: str) -> None:
    """Raises `ValueError` naming `source` and what differs."""
    problem = ""
    for settings in reduced_settings(config):
        try:
            reduced = modules_config(settings, (), source)
            if modules_of(reduced).parameters > MOST_PARAMETERS:
                raise ValueError(f"it has {modules_of(reduced).parameters:,} parameters")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                reference = with_values(modules_of(reduced).settings)
            expected = _expected(reference, reduced.vocab_size)
        except ERRORS as error:
            problem = problem or f"{type(error).__name__}: {words_of(error)}"
            continue
        if kinds_of(reduced) != kinds_of(config):
            problem = problem or "a smaller model of its classes calls attention in another way"
            continue
        _compare(reduced, reference.state_dict(), expected, f"{source}: {config.architecture}")
        return
    raise ValueError(
        f"{source}: no small model of {config.architecture} can be made to check what its modules compute: "
        f"{problem}; --advanced.skip-model-check serves it unchecked"
    )


def kinds_of(config: ModelConfig) -> set[Any]:
    """The kinds of attention, without sizes."""
    return {_kind(layer)[:-1] for layer in modules_of(config).layers}


def _kind(layer: ModuleAttention | ModuleStates | ModuleIndex) -> tuple[Any, ...]:
    """What the layer does, and its sizes."""
    if isinstance(layer, ModuleIndex):
        return "index", layer.head_dim
    if isinstance(layer, ModuleStates):
        return tuple((x.name, x.index, x.float32) for x in layer.states), tuple(x.shape for x in layer.states)
    return layer.span and layer.span.chunked, layer.softcap is None, layer.sinks, layer.chosen, layer


def reduced_settings(config: ModelConfig) -> Sequence[Mapping[str, Any]]:
    """Settings of small models with the same classes, the smallest first."""
    whole = json.loads(modules_of(config).settings)
    whole["architectures"] = [config.architecture]
    settings = dict(text_of(whole))
    layers = _layers_of_each_kind(config)
    fewer = _cut(settings, settings.get("num_hidden_layers", 0), layers)
    for name in fewer:
        if name.endswith("token_id"):
            fewer[name] = _known(fewer[name])
    few = _with(fewer, {**MANY, **LENGTHS})
    heads, kv_heads = settings.get("num_attention_heads"), settings.get("num_key_value_heads")
    narrow = _with(few, WIDTHS)
    latents = settings.get("kv_lora_rank") is not None
    if latents and settings.get("head_dim") not in (None, settings.get("qk_rope_head_dim")):
        narrow["head_dim"] = WIDTHS["qk_nope_head_dim"] + WIDTHS["qk_rope_head_dim"]
    alike = kv_heads == heads or latents
    if heads is not None:
        narrow["num_attention_heads"] = 4
        if kv_heads is not None:
            narrow["num_key_value_heads"] = 4 if alike else 1 if kv_heads == 1 else 2
    if isinstance(of_layers := fewer.get("per_layer_config"), Mapping):
        narrow["per_layer_config"] = {
            layer: {name: narrow.get(name, value) for name, value in own.items()}
            for layer, own in of_layers.items()
        }
    of_keys, of_values = (settings.get(f"linear_num_{of}_heads") for of in ("key", "value"))
    if of_keys is not None and of_values is not None:
        narrow |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 if of_keys == of_values else 4}
    if heads is not None and "mrope_section" in (settings.get("rope_parameters") or {}):
        size = settings.get("head_dim") or settings["hidden_size"] // heads  # whose sections have sizes
        narrow |= {"head_dim": size, "hidden_size": narrow["num_attention_heads"] * size}
    if text_of(whole) is whole:
        return [narrow, few]
    return [
        {name: _into(part, settings, each) for name, part in whole.items()} | {"text_config": each}
        for each in (narrow, few)
    ]


def _into(part: Any, text: Mapping[str, Any], smaller: Mapping[str, Any]) -> Any:
    """The settings of an encoder of images or sounds, whose output has the width of a smaller text model."""
    if not isinstance(part, Mapping):
        return part
    sizes = text.get("hidden_size"), smaller.get("hidden_size")
    return {name: sizes[1] if "out" in name and value == sizes[0] else value for name, value in part.items()}


def _known(tokens: Any) -> Any:
    """Token ids within the vocabulary of a small model."""
    if isinstance(tokens, list):
        return [_known(token) for token in tokens]
    return min(tokens, 1) if type(tokens) is int else tokens


def _with(settings: Mapping[str, Any], smaller: Mapping[str, int]) -> dict[str, Any]:
    """The settings with at most these sizes, also of rotation."""
    made = dict(settings)
    for name, size in smaller.items():
        value = settings.get(name)
        if isinstance(value, int | float) and value > size:
            made[name] = size
    if isinstance(rope := settings.get("rope_parameters"), Mapping):
        made["rope_parameters"] = {
            name: _with(part, smaller) if isinstance(part, Mapping) else part
            for name, part in _with_rope(rope).items()
        }
    return made


def _with_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    original = "original_max_position_embeddings"
    return {**rope, original: LENGTHS[original]} if original in rope else dict(rope)


def _cut(settings: Mapping[str, Any], before: int, layers: int) -> dict[str, Any]:
    """The settings of the first layers."""
    cut = {
        name: value[:layers]
        if isinstance(value, list) and len(value) == before > 1
        else {key: each for key, each in value.items() if int(key) < layers}
        if isinstance(value, Mapping) and value and all(str(key).isdecimal() for key in value)
        else value
        for name, value in settings.items()
    }
    return cut | {"num_hidden_layers": layers}


def _layers_of_each_kind(config: ModelConfig) -> int:
    """The first layers that have all kinds: of attention, and of parameters."""
    modules, first = modules_of(config), dict[Any, int]()
    parameters: dict[int, set[tuple[str, torch.Size]]] = {}
    for name, x in on_meta(modules.settings).named_parameters():
        if match := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.(.*)", name):
            parameters.setdefault(int(match[1]), set()).add((match[2], x.shape))
    calls = len(modules.layers) // max(1, len(parameters))
    for layer, kinds in sorted(parameters.items()):
        called = tuple(_kind(each) for each in modules.layers[calls * layer : calls * (layer + 1)])
        first.setdefault((frozenset(kinds), called), layer)
    return 1 + max(first.values(), default=0)


@torch.inference_mode()
def _expected(reference: Any, vocab_size: int) -> list[tuple[Tensor, Tensor]]:
    """The prompts, and their logits by transformers alone."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, vocab_size, (length,), generator=generator) for length in (PROMPT, SHORT)]
    prompts.append(prompts[1][:1])
    return [(ids, reference(input_ids=ids[None], use_cache=False).logits[0]) for ids in prompts]


@torch.inference_mode()
def _compare(
    config: ModelConfig, state: Mapping[str, Tensor], expected: Sequence[tuple[Tensor, Tensor]], what: str
) -> None:
    """Raises `ValueError` for the first step whose logits differ. `state`: the weights."""
    cpu = torch.device("cpu")
    config = replace(config, max_model_len=64)
    weights = Weights(MadeWeights(config, state), torch.float32, cpu, lambda *_: None, PlainFormat(), Ranks())
    model, specs = (
        ModulesModel(config, weights),
        ModulesModel.cache_spec(config, torch.float32, torch.float32),
    )
    cache = LayerCaches(specs, block_size=BLOCK, max_model_len=64, device=cpu)
    cache.open(8, num_slots=3)
    shapes = attention_shapes(specs, config, range(len(specs)))
    layers = LayerAttention(Kernels(), cache, config, shapes, torch.float32)
    tables = torch.tensor([[5, 2], [1, 6], [3, 4]], dtype=torch.int32)
    steps = {
        "the first tokens of a prompt": [(0, 0, CUT)],
        "more tokens of a prompt, beside another prompt": [(0, CUT, PROMPT - 1), (1, 0, SHORT)],
        "a decode": [(0, PROMPT - 1, PROMPT), (2, 0, 1)],
    }
    for name, parts in steps.items():
        decodes = name == "a decode"
        ids = torch.cat([expected[request][0][start:stop] for request, start, stop in parts])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
        slots = torch.cat([_slots(tables[request], start, stop) for request, start, stop in parts])
        attention = AttentionMetadata(
            BLOCK, slots, tables[[request for request, _, _ in parts]],
            torch.tensor([stop for _, _, stop in parts if decodes], dtype=torch.int32),
            len(parts) if decodes else 0, () if decodes else [(start, stop) for _, start, stop in parts],
            state_slots=torch.tensor([request for request, _, _ in parts], dtype=torch.int32),
        )  # fmt: skip
        callers = layers.of_step(attention, _nothing), layers.mix_of_step(attention, _nothing)
        with computing(CurrentStep(attention.num_decodes)):
            logits = model.logits(model(ids, positions, *callers))
        wanted = torch.cat([expected[request][1][start:stop] for request, start, stop in parts])
        error = float((logits - wanted).abs().max() / wanted.abs().max())
        if not error <= CLOSE:
            raise ValueError(
                f"{what}: its modules do not compute the same with Baton's attention: {name} differs by "
                f"{error:.1g} of the largest logit; --advanced.model-impl baton or --engine vllm may serve it"
            )


def _nothing(layer: int) -> None:
    """A layer is done: nothing waits for it."""


def _slots(table: Tensor, start: int, stop: int) -> Tensor:
    positions = torch.arange(start, stop)
    return table[positions // BLOCK].long() * BLOCK + positions % BLOCK
