"""Groups of vLLM workers that share experts: real engines, and tokens of transformers."""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.system.machine import until
from tests.within import WITHIN

from .served import Reference, VLLMCluster, prompts_of, save_model, serving

TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    directory = tmp_path_factory.mktemp("experts")
    return save_model(directory, "Qwen3Moe", **experts, moe_intermediate_size=64)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMCluster]:
    with serving(
        model, tmp_path_factory.mktemp("served"), "--data-parallel-size", "2",
        "--max-model-len", "512", "--advanced.block-size", "64", "--advanced.num-blocks", "60",
        "--max-num-batched-tokens", "256", "--max-num-seqs", "8",
    ) as served:  # fmt: skip
        yield served


def workers_of(cluster: VLLMCluster) -> dict[str, dict[str, Any]]:
    """Their reports, by their names."""
    with urllib.request.urlopen(f"{cluster.url}/status", timeout=WITHIN) as response:
        return {f"{worker['role']} {worker['index']}": worker for worker in json.load(response)["workers"]}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_engine_of_a_group_is_a_worker(cluster: VLLMCluster, reference: Reference) -> None:
    """Prompts go from prefill workers to decode workers. Engines without requests take part in all steps."""
    workers = workers_of(cluster)
    assert workers.keys() == {"prefill 0", "prefill 1", "decode 0", "decode 1"}
    groups = {name: worker["description"]["group"] for name, worker in workers.items()}
    assert groups["prefill 0"] == groups["prefill 1"] != groups["decode 0"] == groups["decode 1"]
    assert {worker["description"]["data_parallel_size"] for worker in workers.values()} == {2}
    prompts = prompts_of([200, 90, 150, 30, 250, 64], 1)
    expected = [reference.tokens(prompt, TOKENS) for prompt in prompts]

    def ask(prompt: list[int]) -> list[int]:
        return cluster.ask(prompt=prompt, max_tokens=TOKENS)["token_ids"]

    assert [*map(ask, prompts[:2])] == expected[:2]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert [*pool.map(ask, prompts)] == expected
    cluster.assert_whole()
    after = workers_of(cluster)
    assert all(after[name]["status"]["kv_transfers"] for name in workers), "each has sent or received KV"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_dead_engine_ends_its_group_and_streams_go_on(cluster: VLLMCluster, reference: Reference) -> None:
    [prompt] = prompts_of([60], 2)
    before, tokens = workers_of(cluster), reference.tokens(prompt, 150)
    title = "decode 1 engine::EngineCore_DP1"
    cluster.goes_on(tokens, title, role="decode group 0", prompt=prompt)

    def joined() -> dict[str, dict[str, Any]] | None:
        found = workers_of(cluster)
        return found if len(found) == len(before) else None

    after = until(joined, WITHIN, "the routers have all workers again")
    for name, worker in after.items():
        assert (worker["incarnation"] == before[name]["incarnation"]) == name.startswith("prefill"), name
    assert after["decode 0"]["description"]["group"] == after["decode 1"]["description"]["group"]
    assert after["decode 0"]["description"]["group"] != before["decode 0"]["description"]["group"]
    assert cluster.ask(prompt=prompt, max_tokens=TOKENS)["token_ids"] == tokens[:TOKENS]
    cluster.assert_whole()
