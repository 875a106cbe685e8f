"""What the metadata of a GGUF file mean, as the settings that a `config.json` of the same model has. Pure.

llama.cpp gives each key a name below that of the architecture, such as `llama.rope.freq_base`. Here keys
stand without it. A key that llama.cpp knows and Baton does not read could change what the model computes. So
it is refused, unless it has the value with which it changes nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gguf.constants import Keys

from baton.engine.loader.settings import Settings

SETTINGS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Metadata that each file has, by their names in `config.json`."""

OTHER_SETTINGS = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}

SCALING = "rope.scaling."
FACTORS = f"{SCALING}factor", "rope.scale_linear"
"""The second one is of files before 2024."""
ATTENTION = f"{SCALING}attn_factor"
"""A multiple of what the factor alone makes of attention, but with LongRoPE's factors the whole."""
READ = {
    *SETTINGS.values(),
    "attention.head_count_kv",
    "attention.key_length",
    "rope.dimension_count",
    "rope.freq_base",
    *(f"{SCALING}{name}" for name in ("type", "factor", "original_context_length", "attn_factor")),
    *(f"{SCALING}yarn_{name}" for name in ("attn_factor", "beta_fast", "beta_slow")),
}
"""By each architecture. Some read more."""
OF_TENSORS = {
    "attention.value_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "leading_dense_block_count",
    "vocab_size",
}
"""The shapes and names of tensors say it, too. Tensors that do not fit are refused."""
OF_OTHER_USES = {
    "attention.layer_norm_epsilon",  # these architectures have RMSNorm alone
    "classifier.output_labels",
    "pooling_type",
    "rope.dimension_sections",  # equal for text
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
"""They change no token of a text."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "attention.causal": (True,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (1,),  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
}
"""Values with which a key that is not read changes nothing. Of others it is 0."""
KNOWN = {
    key.removeprefix("{arch}.")
    for group in vars(Keys).values()
    if isinstance(group, type)
    for key in vars(group).values()
    if isinstance(key, str) and key.startswith("{arch}.")
}
"""Those of llama.cpp."""
UNREAD = KNOWN - READ - OF_TENSORS - OF_OTHER_USES


class Metadata:
    """The metadata of one architecture. Methods raise `ValueError` naming the file and the whole key."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, source: str) -> None:
        prefix = f"{architecture}."
        self.values = {
            key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
        }
        self._named = f"metadata {prefix}"
        self._settings = Settings(
            {f"{self._named}{key}": value for key, value in self.values.items()}, source
        )
        self._source = source

    def check(self, also_read: Sequence[str]) -> None:
        """`also_read`: keys that this architecture reads beside `READ`."""
        if missing := [key for key in SETTINGS.values() if key not in self.values]:
            raise ValueError(f"{self._source}: {self._named}{missing[0]} is missing")
        for key in sorted(self.values.keys() & UNREAD - {*also_read}):
            if self.values[key] not in NEUTRAL.get(key, (0,)):
                raise ValueError(f"{self._source}: {self._named}{key} {self.values[key]!r} is not supported")

    def integer(self, key: str, default: int | None = None) -> int:
        return self._settings.integer(f"{self._named}{key}", default)

    def settings(self) -> dict[str, Any]:
        """Those that have other names in `config.json`."""
        renamed = {**SETTINGS, **OTHER_SETTINGS}
        return {name: self.values[key] for name, key in renamed.items() if self.values.get(key) is not None}

    def rope_scaling(self, factors: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """With llama.cpp's defaults. `factors`: the settings of LongRoPE that are tensors; empty: none."""

        def number(key: str, default: float | None = None) -> float:
            return self._settings.number(f"{self._named}{key}", default)

        kind, get = self.values.get(f"{SCALING}type", "linear"), self.values.get
        factor_key = next((key for key in FACTORS if get(key)), None)
        original = {"original_max_position_embeddings": get(f"{SCALING}original_context_length")}
        if factors:
            return {**original, **factors, "rope_type": "longrope", "attention_factor": get(ATTENTION)}
        if kind not in ("none", "linear", "yarn"):
            raise ValueError(
                f"{self._source}: rope scaling {kind!r} is not supported (none, linear, yarn are)"
            )
        attention = number(ATTENTION, 1.0)
        if attention != 1 and (kind != "yarn" or factor_key is None):
            raise ValueError(f"{self._source}: {self._named}{ATTENTION} {attention} is not supported")
        if kind == "none" or factor_key is None:
            return None
        factor = number(factor_key)
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        usual = number(f"{SCALING}yarn_attn_factor", 1 + 0.1 * math.log(max(1.0, factor)))
        betas = {name: get(f"{SCALING}yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return {
            **original,
            **betas,
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": attention * usual,
        }
