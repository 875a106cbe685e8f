"""Two real vLLM engines hand over the latents of a model with multi-head latent attention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_worker.engines import GREEDY, Server, generated, prompts_of

OPTIONS: dict[str, Any] = {
    "max_model_len": 512, "max_num_batched_tokens": 512, "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
}  # fmt: skip
"""What vLLM's attention with latents can do on CPUs."""


def save_model(where: Path) -> Path:
    """A tiny DeepSeek-V3 without experts. vLLM's kernel for CPUs reads only latents of this size."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=500, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, initializer_range=0.1, kv_lora_rank=512,
        q_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=3,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(where)
    return where


@pytest.mark.long
@pytest.mark.timeout(600)
def test_latents_are_handed_over(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    prompts = prompts_of([3, 16, 17, 60, 300], 1)
    servers = [
        Server(model, kv_transfer_config={"kv_role": role, "kv_load_failure_policy": "fail"}, **OPTIONS)
        for role in ("kv_producer", "kv_consumer")
    ]
    prefill, decode = servers
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.line, servers))
        found = []
        for prompt in prompts:  # vLLM's attention with latents on CPUs is wrong for batches
            [(_, params)] = prefill.answers(
                [(prompt, GREEDY | {"max_tokens": 1}, {"do_remote_decode": True})]
            )
            [(tokens, _)] = decode.answers([(prompt, GREEDY, params)])
            found.append(tokens)
        assert found == generated(model, prompts)
    finally:
        for server in servers:
            server.kill()
