"""Makes a decode worker repeat the first token, which its prefill worker has sampled.

vLLM computes the last position of a prompt again when its KV has come, and samples. This class leaves it no
choice. So all state of vLLM that depends on the output (penalties, grammar, seeds, `min_tokens`) is that of
one engine. The router drops the repeated token by its index.

It is for `logits_processors` of vLLM's engine. Only its model runner V1 has this interface in all versions
that are tested: set `VLLM_USE_V2_MODEL_RUNNER=0`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class RepeatFirstToken(LogitsProcessor):
    """For requests that have in their `kv_transfer_params` a `decode_id`, or the `first_token` that this
    worker has sampled itself."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        # By row of the batch: the decode id or the token, and the output, to which vLLM appends.
        self._rows: dict[int, tuple[bytes | int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _repeats)
        # With async scheduling a token counts from when its step is launched.
        for row in [row for row, (_, output) in self._rows.items() if output]:
            del self._rows[row]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits`: [rows, vocabulary]. Later steps of the sampler leave one token as it is."""
        for row, (known, _) in self._rows.items():
            token = known if isinstance(known, int) else get_kv_transfer_group().first_token(known)
            logits[row] = -float("inf")
            logits[row, token] = 0.0
        return logits


def _repeats(
    params: SamplingParams, prompt: list[int] | None, output: list[int]
) -> tuple[bytes | int, list[int]] | None:
    """Returns None for a request without a known first token, or that has it already: it may come again after
    a preemption."""
    said = (params.extra_args or {}).get("kv_transfer_params") or {}
    if output:
        return None
    if "first_token" in said:
        return said["first_token"], output
    return (bytes.fromhex(said["decode_id"]), output) if "decode_id" in said else None
