"""Lets vLLM's model runner V1 have new requests that begin with an output. Its runner V2 can have them.

The prompt of such a request, and the first token, come from another worker. For vLLM's scheduler it is like a
request that goes on after a preemption. But the runner has never seen it, and V1 makes the state of a new
request without an output.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker import gpu_model_runner


def let_requests_begin_with(first_tokens: Mapping[str, int], vocabulary: int) -> None:
    """`first_tokens`: by request id, those of the step that begins. `vocabulary`: tokens of the model."""

    sampler = TopKTopPSampler()

    class BegunRequest(gpu_model_runner.CachedRequestState):
        def __post_init__(self) -> None:
            super().__post_init__()
            if (token := first_tokens.get(self.req_id)) is not None:
                self.output_token_ids.append(token)
                if self.generator is not None:  # it has drawn the token elsewhere
                    logits = torch.zeros(1, vocabulary, device=self.generator.device)
                    sampler(logits, {0: self.generator}, None, None)

    gpu_model_runner.CachedRequestState = BegunRequest
