"""Real vLLM engines hand over the latents of a model with multi-head latent attention."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_worker.engines import GREEDY, TOKENS, Server, generated, prompts_of
from tests.vllm_worker.served import VLLMCluster, joined, save_model

pytestmark = pytest.mark.all

COMPILATION = {"custom_ops": ["-rotary_embedding"]}
"""In eager mode vLLM would use an operator for CPUs that rotates only one head of a query, and writes over
the latent beside a key."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 512, "max_num_batched_tokens": 512, "enable_prefix_caching": False,
    "enable_chunked_prefill": False, "compilation_config": COMPILATION, "attention_backend": "CPU_MLA",
}  # fmt: skip
"""What vLLM's attention with latents can do on CPUs. That for AMX, its choice where there is AMX, computes no
float32."""
LENGTHS = [3, 16, 17, 60, 300]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 without experts. vLLM's kernel for CPUs reads only latents of this size."""
    return save_model(
        tmp_path_factory.mktemp("latents"), "DeepseekV3", vocab_size=500, max_position_embeddings=2048,
        num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, first_k_dense_replace=3,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(600)
def test_latents_are_handed_over(model: Path) -> None:
    """Behind a proxy. Tokens are those of one vLLM, and of transformers."""
    prompts = prompts_of(LENGTHS, 1)
    servers = [
        Server(model, kv_transfer_config={"kv_role": role, "kv_load_failure_policy": "fail"}, **OPTIONS)
        for role in ("kv_producer", "kv_consumer")
    ]
    prefill, decode = servers
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.line, servers))
        wanted = GREEDY | {"max_tokens": 1}
        held = prefill.answers([(prompt, wanted, {"do_remote_decode": True}) for prompt in prompts])
        handed = [(prompt, GREEDY, params) for prompt, (_, params) in zip(prompts, held, strict=True)]
        alone = [(prompt, GREEDY, None) for prompt in prompts]
        right = [(tokens, None) for tokens in generated(model, prompts)]
        assert decode.answers(handed) == decode.answers(alone) == right
    finally:
        for server in servers:
            server.kill()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_latents_between_workers(model: Path, tmp_path: Path) -> None:
    """Of vLLM, and of vLLM and Baton's engine in both directions."""
    limits = "--max-model-len", "512", "--advanced.num-blocks", "200", "--no-enable-prefix-caching"
    eager = "--enforce-eager --attention-backend CPU_MLA"
    eager += f" --compilation-config '{json.dumps(COMPILATION)}'"
    cluster = VLLMCluster(model, tmp_path, *limits, "--vllm-args", eager)
    try:
        cluster.until_ready()
        with joined(cluster, *limits) as fronts, ThreadPoolExecutor() as pool:
            for seed, front in enumerate((cluster, *fronts)):
                prompts = prompts_of(LENGTHS, seed)
                answers = pool.map(lambda x, front=front: front.ask(prompt=x, max_tokens=TOKENS), prompts)
                assert [answer["token_ids"] for answer in answers] == generated(model, prompts)
                computed = {
                    role: x["status"]["computed_prompt_tokens"] for role, x in front.workers().items()
                }
                assert computed["decode"] == 0, "all KV was handed over"
        cluster.stop()
    finally:
        cluster.kill()
