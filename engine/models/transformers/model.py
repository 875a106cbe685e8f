"""A model of transformers' modules, as the runner calls it."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from baton.engine.kernels import Kernels
from baton.engine.layers.current_step import current_step
from baton.engine.layers.ranks import unsharded
from baton.engine.layers.weights import DTYPES, Weights
from baton.engine.model_config import ModelConfig, ModuleAttention, ModulesConfig, ModuleStates
from baton.engine.models.cache_spec import AttentionCache, CacheSpec, ModuleStateCache
from baton.engine.models.transformers import replaced
from baton.engine.models.transformers.interface import Pass, calling
from baton.engine.models.transformers.modules import build
from baton.engine.models.vision import TOWER
from baton.kv_names.cache_kinds import INDEX

INTEGERS = (torch.int64, torch.int32, torch.bool)


class Computed(nn.Module):
    """Takes the place of the layers below the output projection, and gives it what they have computed."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.of_layers = (layers,)  # a tuple hides it from torch
        self.output: type[Any] | None = None
        """What the layers return. None: they have computed nothing yet."""
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["of_layers"][0], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        assert self.output is not None, "a pass of the layers comes before"
        return self.output(last_hidden_state=self.hidden)


class ModulesModel:
    @staticmethod
    def cache_spec(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        return tuple(
            ModuleStateCache(
                tuple(
                    (f"{x.name}.{x.index}", x.shape, torch.float32 if x.float32 else dtype)
                    for x in layer.states
                )
            )
            if isinstance(layer, ModuleStates)
            else AttentionCache(layer.num_kv_heads, layer.head_dim, kv_dtype, layer.span)
            if isinstance(layer, ModuleAttention)
            else AttentionCache(1, layer.head_dim, dtype, kind=INDEX)
            for layer in modules_of(config).layers
        )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        modules = modules_of(config)
        self.attention = modules.attention
        if weights.kernels.exact:
            raise ValueError(
                f"--batch-invariant: modules of transformers, which compute {config.architecture}, sum in "
                "orders of their own; leave it out"
            )
        whole = build(modules.settings)
        _compute_buffers(whole, weights.device)
        _load(whole, weights, modules.read)
        if weights.device.type != "meta":
            with torch.inference_mode():
                replaced.norms(whole, weights, modules.read)
                replaced.mixtures(whole, weights)
        self.head = whole
        self.cache: dict[str, Any] = {"use_cache": False}
        name, self.body = body_of(whole)
        self.tower: dict[str, Tensor] = {}
        """As in `TakesImages`."""
        if config.vision is not None:
            self.tower = weights.below(TOWER)
            _take_images(whole, config.vision.deepstack, weights.kernels)
        if modules.states:
            self.cache = _keep_states(whole, self.body, modules.states)
        if modules.indexes:
            from baton.engine.models.transformers.indexed import keep_indexes

            self.cache |= keep_indexes(whole, modules.indexes)
        self.computed = Computed(self.body)
        whole.set_submodule(name, self.computed)
        # It rotates nothing: modules have rotated queries and keys already.
        dtype = weights.dtype if weights.device.type == "cpu" else torch.float32
        one = torch.tensor([1.0, 0.0], dtype=dtype, device=weights.device)
        self.unrotated = {
            size: one[None, :, None].repeat(1, 1, size)
            for size in {layer.head_dim for layer in self.attention.values()}
        }

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Callable[..., Tensor],
        mix: Callable[..., None] = lambda *_: None,
    ) -> Tensor:
        """As `Llama`. `mix`: as `states.MixModules`."""
        first = torch.zeros_like(positions)
        rotaries = {size: table.index_select(0, first) for size, table in self.unrotated.items()}
        with calling(Pass(attend, mix, iter(self.attention.items()), rotaries)):
            output = self.body(input_ids=token_ids[None], position_ids=_along_axes(positions), **self.cache)
        self.computed.output = type(output)
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Llama.logits`: what the modules compute above their layers."""
        self.computed.hidden = hidden[None]
        logits = self.head(input_ids=None, use_cache=False).logits[0]
        self.computed.hidden = None  # new weights find a model between steps
        return logits


class Placing:
    """Takes the place of the function `forward` of a module. Features of images replace rows that it makes,
    or are added to them."""

    def __init__(self, forward: Callable[..., Tensor], part: int, kernels: Kernels) -> None:
        """`part`: 0 the embeddings, i + 1 what layer i adds."""
        self.forward, self.part, self.kernels = forward, part, kernels

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        rows = self.forward(*args, **named)
        if (images := current_step().images) is not None:
            features, part = images.features, self.part
            self.kernels.place_images(rows[0], images.index, features, part, added=part > 0)
        return rows


def _take_images(whole: Any, deepstack: int, kernels: Kernels) -> None:
    """From now on features of images stand in place of embeddings of tokens. The first layers add some."""
    places = [whole.get_input_embeddings(), *whole.get_decoder().layers[:deepstack]]
    for part, module in enumerate(places):
        module.forward = Placing(module.forward, part, kernels)


def _along_axes(positions: Tensor) -> Tensor:
    """The positions of a step as modules take them: [1, rows], or [3, 1, rows] with images in time, from the
    top and from the left. Those of text are equal along all axes."""
    step = current_step()
    if step.rotary_shift is None:
        return positions[None]
    positions = positions + step.rotary_shift
    if (images := step.images) is None:
        return positions[None]
    of_images = images.positions[images.index.clamp_min(0)].T  # [3, rows]
    return torch.where(images.index >= 0, of_images, positions)[:, None]


def modules_of(config: ModelConfig) -> ModulesConfig:
    assert config.modules is not None, "the loader sets it for this architecture"
    return config.modules


def _keep_states(whole: Any, body: Any, layers: Mapping[int, ModuleStates]) -> dict[str, Any]:
    """Gives modules the states of requests. Returns the arguments with which the model hands them a cache."""
    from baton.engine.models.transformers import states

    for number, kept in layers.items():
        module = whole.get_submodule(kept.module)
        module.forward = states.Stateful(module.forward, number, kept)
    takes = inspect.signature(body.forward).parameters
    name = next(name for name in ("past_key_values", "cache_params") if name in takes)
    return {name: states.held(next(iter(layers.values())), None), "use_cache": True}


def body_of(whole: Any) -> tuple[str, Any]:
    """The layers with the embedding and the last norm, and where the modules have them."""
    from transformers import PreTrainedModel

    parts = {name: part for name, part in whole.named_modules() if name and isinstance(part, PreTrainedModel)}
    sees = whole.config.get_text_config() is not whole.config
    decoder = whole.base_model if sees else whole.get_decoder()
    return next((item for item in parts.items() if item[1] is decoder), next(iter(parts.items())))


def _compute_buffers(whole: Any, device: torch.device) -> None:
    """Gives buffers that no checkpoint has, such as frequencies, their values. Parameters stay on "meta"."""
    kept = {id(x) for x in whole.state_dict(keep_vars=True).values()}
    for module in whole.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in kept:
                values = torch.zeros_like(buffer, device=device)
                module.register_buffer(name, values, persistent=False)
    whole.initialize_weights()


def _load(whole: Any, weights: Weights, read: Collection[str]) -> None:
    """Gives all parameters and buffers of a state dict their values. Those that are tied share them. `read`:
    modules that stay as they are."""
    state, names = whole.state_dict(keep_vars=True), dict[int, list[str]]()
    for name, x in state.items():
        names.setdefault(id(x), []).append(name)
    tied = {name for each in names.values() if len(each) > 1 for name in each}
    done = replaced.linears(whole, weights, {*read, *(name.rpartition(".")[0] for name in tied)})
    done |= replaced.dequantized(whole, weights)
    for all_names in names.values():
        if done & {all_names[0], all_names[0].rpartition(".")[0]}:
            continue
        name = next(filter(weights.has, all_names), all_names[0])
        value = _value(name, state[name], weights)
        for each in all_names:
            path, _, last = each.rpartition(".")
            if isinstance(state[name], nn.Parameter):
                setattr(whole.get_submodule(path), last, nn.Parameter(value, requires_grad=False))
            else:
                whole.get_submodule(path).register_buffer(last, value)


def _value(name: str, x: Tensor, weights: Weights) -> Tensor:
    if isinstance(x, nn.Parameter):
        return weights.take(name, tuple(x.shape))
    dtypes = DTYPES if x.is_floating_point() else INTEGERS
    return weights.stored(name, [unsharded(size) for size in x.shape], *dtypes).to(x.dtype)
