"""Drafts in a cluster: several answers to a prompt, what usage says, and kills while a head drafts."""

import asyncio
import json
from pathlib import Path

import openai
import pytest

from baton.bench.lab.harness.cluster import LocalCluster
from baton.bench.lab.harness.streams import cases, expected
from baton.engine import Engine
from tests.engine.conftest import request_of, tokens_of
from tests.engine.draft_checkpoints import random_eagle

from .recovery import FLAGS, Broken, each_has

pytestmark = pytest.mark.all


async def test_answers_to_one_prompt_are_those_without_drafts(
    broken: Broken, client_of_broken: openai.AsyncOpenAI, one_engine: Engine
) -> None:
    await asyncio.to_thread(broken.all_back)
    prompt, length = [*range(100, 130), *range(100, 120)], 40
    requests = [
        request_of(900 + n, prompt, max_tokens=length, temperature=0.5, seed=7 + n, ignore_eos=True)
        for n in range(3)
    ]
    answers = await client_of_broken.completions.create(
        model=(await client_of_broken.models.list()).data[0].id, prompt=prompt, n=3, max_tokens=length,
        temperature=0.5, seed=7, extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    found = [(choice.model_extra or {})["token_ids"] for choice in answers.choices]
    assert found == tokens_of(one_engine, requests)
    assert answers.usage is not None
    assert answers.usage.completion_tokens == 3 * length
    details = answers.usage.completion_tokens_details
    assert details is not None, "some of it was drafted"
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None
    assert rejected is not None
    assert 0 <= accepted < 3 * length
    assert accepted + rejected > 0

    # A stop string ends the text also if tokens behind it come in the same message.
    text = answers.choices[0].text
    middle = range(len(text) // 2, len(text) - 3)
    stop = next(text[i : i + 3] for i in middle if text[i : i + 3].isascii())
    ended = await client_of_broken.completions.create(
        model=answers.model, prompt=prompt, max_tokens=length, temperature=0.5, seed=7, stop=[stop],
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert ended.choices[0].text == text[: text.index(stop)]
    assert ended.choices[0].finish_reason == "stop"


@pytest.mark.long
async def test_kills_while_a_head_drafts(
    tmp_path: Path, shallow_model: list[str], shallow_model_path: Path
) -> None:
    """The KV of the head is handed over, and computed again after a kill. No client reads another token."""
    for name in ("plain", "drafting"):
        (tmp_path / name).mkdir()
    random_eagle(tmp_path / "head", shallow_model_path, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    wanted = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 2}
    flags, asked = list(FLAGS), cases(8, 150, repeat=4)
    at = flags.index("--speculative-config")
    with LocalCluster(
        tmp_path / "plain",
        worker_flags=[*flags[:at], *flags[at + 2 :], *shallow_model],
        router_flags=shallow_model,
    ) as plain:
        right = await expected(plain.url, asked, at_once=8)
    flags[at + 1] = json.dumps(wanted)
    with LocalCluster(
        tmp_path / "drafting",
        worker_flags=[*flags, *shallow_model],
        router_flags=["--advanced.no-overflow", "--advanced.no-split-prompts", *shallow_model],
    ) as cluster:
        broken = Broken(cluster, right)

        def strike(role: str) -> None:
            broken.busiest(role).kill("engine")

        await broken.ride(asked, (each_has(2), lambda: strike("decode")), felt=broken.retries)
        await broken.settled()
        await broken.ride(asked, (broken.transferring, lambda: strike("prefill")), felt=broken.retries)
        await broken.settled()
        drafts = "vllm:spec_decode_num_draft_tokens_total"
        assert sum(worker.metric(drafts) for worker in cluster.of("decode"))
