"""A model with states: vLLM computes the first chunk of a prompt as a decode if it has one token.

vLLM's graphs of decodes are chosen by the number of tokens alone. Layers of Mamba take such a chunk for a
prompt, and the graph reads slots of an earlier step (vLLM #57720). Gated delta nets of 0.26 and linear
attention take it for a decode, and read states that another request has left (#51562). Here it is a decode
in all of them, and begins with states of zeros (`caches.clear_states`): the same numbers, also in a graph.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends import mamba_attn


def compute_as_decodes() -> None:
    """In the process with the model, before its first step. May be repeated."""
    split = mamba_attn.split_decodes_and_prefills

    def by_length(*arguments: Any, **options: Any) -> tuple[int, int, int, int]:
        return split(*arguments, **options | {"treat_short_extends_as_decodes": True})

    mamba_attn.split_decodes_and_prefills = by_length
