"""vLLM engines that draft tokens hand over KV, that of draft layers, too. Tokens are those without drafts."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.draft_checkpoints import add_mtp, random_eagle
from tests.vllm_worker import served
from tests.vllm_worker.engines import GREEDY, Request, Server, generated, prompts_of, save_model
from tests.vllm_worker.test_attached_vllm import SAMPLED, TOKENS, WHOLE, pair
from tests.vllm_worker.test_groups import states

pytestmark = pytest.mark.all

DRAFTS = 3
LENGTHS = [129, 60, 3, 700, 100]


def drafting(method: str, model: Path, head: Path) -> dict[str, Any]:
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    match method:
        case "ngram":
            drafts |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        case "eagle3":
            about: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 2048}
            random_eagle(
                head,
                model,
                eagle_aux_hidden_state_layer_ids=[0, 1, 2],
                bos_token_id=None,
                eos_token_id=0,
                **about,
            )
            drafts["model"] = str(head)
        case "draft_model":
            drafts["model"] = str(model)
    return drafts


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["ngram", "eagle3", "draft_model"])
async def test_tokens_are_those_without_drafts(tmp_path: Path, method: str) -> None:
    """The draft model is the model itself: if its KV came too early, or not at all, few drafts would be
    right. The head is random, and always wrong."""
    model = save_model(tmp_path / "model")
    both = {"speculative_config": drafting(method, model, tmp_path / "head")}
    prompts = prompts_of(LENGTHS, 1)
    greedy = GREEDY | {"max_tokens": TOKENS}
    async with pair(model, 1, both, max_model_len=1024) as (prefill, decode):
        prefill_ids, decode_ids = ([os.urandom(16) for _ in prompts] for _ in range(2))
        prefills: list[Request] = [
            (prompt, SAMPLED, prefill.sends(x)) for prompt, x in zip(prompts, prefill_ids, strict=True)
        ]
        decodes: list[Request] = [
            (prompt, greedy, prefill.fetched_by(decode_id, prefill_id))
            for prompt, decode_id, prefill_id in zip(prompts, decode_ids, prefill_ids, strict=True)
        ]
        first, found = await asyncio.gather(prefill.answers(prefills), decode.answers(decodes))
        continued = [prompt + token for prompt, token in zip(prompts, first, strict=True)]
        assert found == generated(model, continued, TOKENS - 1)
        most = len(prompts) * (TOKENS - 1) * DRAFTS / (DRAFTS + 1)
        assert decode.server.accepted >= {"ngram": 1, "eagle3": 0, "draft_model": 0.8 * most}[method]
        local = await decode.answers([(prompts[0], greedy, {"first_token": 7})])
        assert local == generated(model, [[*prompts[0], 7]], TOKENS - 1), "a prefill of the same worker"


FEW = 12
"""So few tokens that a random head is often right."""


def save_glm(directory: Path) -> Path:
    """Writes a tiny GLM-4.5 with a random layer that predicts a token further."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    heads: dict[str, Any] = {"head_dim": 32}  # vLLM reads it; not all transformers know it
    config = Glm4MoeConfig(
        vocab_size=FEW, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2,
        first_k_dense_replace=2, max_position_embeddings=2048, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None, **heads,
    )  # fmt: skip
    Glm4MoeForCausalLM(config).save_pretrained(directory)
    add_mtp(directory)
    return directory


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_layer_that_predicts_further(tmp_path: Path) -> None:
    """Multi-token prediction: its drafts are those of an engine that has computed all KV itself. Prompts are
    whole: at the end of a chunk vLLM gives this layer the last token of the prompt for the next one."""
    model = save_glm(tmp_path / "model")
    both = WHOLE | {"speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS}}
    prompts = [[token % FEW for token in prompt] for prompt in prompts_of(LENGTHS, 1)]
    greedy = GREEDY | {"max_tokens": 2 * TOKENS}
    async with pair(model, 1, both, max_model_len=1024) as (prefill, decode):
        ids = [(os.urandom(16), os.urandom(16)) for _ in prompts]
        prefills: list[Request] = [
            (prompt, SAMPLED, prefill.sends(x)) for prompt, (x, _) in zip(prompts, ids, strict=True)
        ]
        decodes: list[Request] = [
            (prompt, greedy, prefill.fetched_by(decode_id, prefill_id))
            for prompt, (prefill_id, decode_id) in zip(prompts, ids, strict=True)
        ]
        first, found = await asyncio.gather(prefill.answers(prefills), decode.answers(decodes))
        continued = [prompt + token for prompt, token in zip(prompts, first, strict=True)]
        assert found == generated(model, continued, 2 * TOKENS - 1)
        before, shorter = prefill.server.accepted, greedy | {"max_tokens": 2 * TOKENS - 1}
        assert await prefill.answers([(prompt, shorter, None) for prompt in continued]) == found
        assert decode.server.accepted == prefill.server.accepted - before > len(prompts)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_drafts_of_a_model_with_states_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    states(model)
    drafts, transfer = drafting("ngram", model, model), {"kv_role": "kv_both"}
    server = Server(
        model, kv_transfer_config=transfer, speculative_config=drafts, enable_prefix_caching=False
    )
    try:
        with pytest.raises(AssertionError, match="vLLM has ended"):
            server.line()
    finally:
        server.kill()
    assert "gives other tokens (vLLM #39273, #56531): start vLLM without it" in "".join(capfd.readouterr())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_workers_that_draft(tmp_path: Path) -> None:
    """Steps bring several tokens. A stream goes on when its worker is killed."""
    model = served.save_model(tmp_path / "model")
    drafts = json.dumps(drafting("draft_model", model, tmp_path / "head"))
    reference, [prompt] = served.Reference(model), served.prompts_of([200], 3)
    with served.serving(
        model, tmp_path, "--vllm-args", f"--enforce-eager --speculative-config '{drafts}'"
    ) as cluster:
        tokens = reference.tokens(prompt, 100)
        cluster.goes_on(tokens, "decode 0 engine::EngineCore", prompt=prompt)
        assert cluster.ask(prompt=prompt, max_tokens=30)["token_ids"] == tokens[:30]
        cluster.assert_whole()
