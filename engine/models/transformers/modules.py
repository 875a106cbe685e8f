"""Builds the modules of a model on the device "meta", and records how they call attention."""

import functools
import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from baton.engine.model_config import ModuleAttention, ModuleIndex, ModuleStates
from baton.engine.models.transformers.interface import RECORDING, SERVING, Calls, calling, register
from baton.engine.models.transformers.replaced import compute_experts

TOKENS = 4
"""Of the pass that records calls."""


class LeftOut(nn.Module):
    """In place of a part that text never reaches, such as a tower of images. Text that does raises."""


LAYER_TYPES = (
    "chunked_attention", "conv", "full_attention", "hybrid", "hybrid_sliding", "indexed_attention",
    "linear_attention", "sliding_attention",
)  # fmt: skip


def modules_class(architecture: str, model_type: str) -> Any:
    """The class in transformers. Raises `ValueError` if transformers has none, or is not installed."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ValueError(
            "modules of transformers need it: in Baton's source directory `pip install -e '.[transformers]'` "
            "installs it"
        ) from error
    found = getattr(transformers, architecture, None)
    if found is None and re.fullmatch(r"[a-z]\w*", model_type, re.ASCII):  # some stand in no table
        try:
            found = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
            found = getattr(found, architecture, None)
        except ModuleNotFoundError:
            found = None
    if not isinstance(found, type) or not issubclass(found, transformers.GenerationMixin):
        raise ValueError(
            f"transformers {transformers.__version__} has no causal language model {architecture}"
        )
    return found


def read_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a `config.json` as transformers reads them. Raises any of `ERRORS`."""
    named = values.get("architectures") or [""]
    architecture = str(named[0] if isinstance(named, list) else named)
    kind = modules_class(architecture, str(values.get("model_type", "")))
    settings = _floats(kind.config_class.from_dict(_floats(values)).to_dict())
    settings["architectures"] = [architecture]
    settings.pop("transformers_version", None)
    if other := sorted({*(text_of(settings).get("layer_types") or ())}.difference(LAYER_TYPES)):
        raise ValueError(f"it has layers of type {', '.join(map(str, other))}")
    return settings


def text_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of the text model, also of a model that sees images, too."""
    text = settings.get("text_config")
    return text if isinstance(text, Mapping) else settings


def _floats(x: Any) -> Any:
    """With numbers in place of transformers' words for those that JSON lacks."""
    if isinstance(x, Mapping):
        return (
            float(x["__float__"]) if "__float__" in x else {key: _floats(value) for key, value in x.items()}
        )
    return [_floats(each) for each in x] if isinstance(x, list | tuple) else x


def build(settings: str, implementation: str = SERVING) -> Any:
    """The modules of a causal language model on the device "meta". `settings`: JSON of `read_settings`. Of a
    model that sees images, too, those of its text."""
    register(compute_experts)
    values = json.loads(settings)
    kind = modules_class(values["architectures"][0], str(values.get("model_type", "")))
    values.pop("dtype", None)  # the loader chooses it
    config = kind.config_class.from_dict(
        values, attn_implementation=implementation, experts_implementation=implementation
    )
    with torch.device("meta"):
        whole = kind(config).eval()
    if text_of(values) is not values:
        _leave_out_encoders(whole)
    return whole


def _leave_out_encoders(whole: Any) -> None:
    """Leaves the text model, what holds it, and the output projection."""
    decoder = whole.get_decoder()
    kept = {id(whole.get_output_embeddings()), id(decoder)}
    holding = [part for part in whole.modules() if any(each is decoder for each in part.modules())]
    kept |= {id(part) for part in holding}
    for part in holding:
        if part is decoder:
            break
        for name, child in list(part.named_children()):
            if id(child) not in kept and next(child.parameters(), None) is not None:
                part.set_submodule(name, LeftOut())


on_meta = functools.lru_cache(maxsize=2)(build)
"""As `build`; callers only read the modules."""


def with_values(settings: str) -> Any:
    """The modules with transformers' own attention, and with random values, on a CPU."""
    model = build(settings, "eager").to_empty(device="cpu")
    model.initialize_weights()
    model.tie_weights()
    for name, x in model.state_dict().items():  # far from values with which little would differ
        if x.is_floating_point() and x.dim() < 2:
            x.uniform_(0.5, 1.5)
        elif x.is_floating_point():
            x.normal_(std=0.3 if "embed" in name else 1.4 * x.shape[-1] ** -0.5)
    return model


@functools.lru_cache(maxsize=16)  # it takes a second, and new weights of a model have the same settings
def record_calls(
    settings: str,
) -> tuple[tuple[ModuleAttention | ModuleStates | ModuleIndex, ...], tuple[str, ...]]:
    """How a pass calls attention, keeps states and chooses positions, in order, and the linear modules and
    norms whose weights it reads without calling them. Raises any of `ERRORS`; `ValueError` names what is
    missing."""
    calls, plain = _recorded(settings, torch.float32)
    if any(isinstance(layer, ModuleStates) for layer in calls.layers):
        calls, _ = _recorded(settings, torch.bfloat16)  # which states are in float32 in a smaller type, too
    return tuple(calls.layers), plain


def _recorded(settings: str, dtype: torch.dtype) -> tuple[Calls, tuple[str, ...]]:
    from baton.engine.models.transformers.states import record_modules, watch_states

    model, calls = build(settings, RECORDING).to(dtype), Calls()
    record_modules(model, calls)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    with calling(calls), torch.inference_mode():
        output = model(input_ids=ids)
    if not calls.attention:
        raise ValueError("it never calls transformers' attention interface")
    kept = getattr(output, "past_key_values", None)
    others = {
        type(layer).__name__
        for layer in getattr(kept, "layers", ())
        if not hasattr(layer, "keys") and not hasattr(layer, "conv_states")
    }
    if others:
        raise ValueError(f"its cache has {', '.join(sorted(others))}")
    states = [layer for layer in calls.layers if isinstance(layer, ModuleStates)]
    if states:
        name = "past_key_values" if kept is not None else "cache_params"
        kept = output[name]
        read_none = watch_states(kept, states)
        with calling(Calls(spans=calls.spans)), torch.inference_mode():
            model(input_ids=ids, **{name: kept})
        calls.layers = [
            replace(layer, goes_on=layer.module not in read_none()) if layer in states else layer
            for layer in calls.layers
        ]
    return calls, tuple(
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or "Norm" in type(module).__name__)
        and name not in calls.called
        and name.rpartition(".")[0] in calls.called
    )
