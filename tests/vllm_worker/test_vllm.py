"""Two real vLLM engines with the connector give the tokens of one vLLM, and of transformers.

They stand behind a proxy that was made for vLLM's NixlConnector: the test sends what it sends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_worker.engines import GREEDY, Answers, Server, generated, prompts_of, save_model

PREFILL: dict[str, Any] = {"do_remote_decode": True}


class Servers:
    def __init__(self, model: Path) -> None:
        def connector(role: str) -> dict[str, Any]:
            return {"kv_role": role, "kv_load_failure_policy": "recompute"}

        self.model = model
        self.prefill = Server(model, kv_transfer_config=connector("kv_producer"))
        self.decode = Server(model, kv_transfer_config=connector("kv_consumer"))

    def prefilled(self, prompts: list[list[int]]) -> Answers:
        return self.prefill.answers([(prompt, GREEDY | {"max_tokens": 1}, PREFILL) for prompt in prompts])

    def decoded(self, prompts: list[list[int]], prefilled: Answers) -> list[list[int]]:
        """As a proxy that was made for NixlConnector: with the parameters that the prefill server gave."""
        requests = [(prompt, GREEDY, params) for prompt, (_, params) in zip(prompts, prefilled, strict=True)]
        return [tokens for tokens, _ in self.decode.answers(requests)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    started = Servers(save_model(tmp_path_factory.mktemp("vllm")))
    servers = (started.prefill, started.decode)
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.line, servers))
        yield started
    finally:
        for server in servers:
            server.kill()


MANY = [random.Random(0).randrange(3, 2000) for _ in range(26)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "lengths",
    [[3, 128, 129, 300, 700], pytest.param([3, 127, 1500, 2000, *MANY], marks=pytest.mark.long)],
    ids=["five", "thirty"],
)
def test_tokens_are_those_of_one_engine(servers: Servers, lengths: list[int]) -> None:
    """Long prompts are computed in chunks. Two prompts begin with the same block, which their step computes.
    The second time both servers have the first blocks in their prefix caches."""
    prompts = prompts_of(lengths, len(lengths))
    block, *ends = prompts_of([128, 1, 60], 7)
    prompts = [*(block + end for end in ends), *prompts]
    expected = generated(servers.model, prompts)
    for _ in range(2):
        prefilled = servers.prefilled(prompts)
        assert [tokens for tokens, _ in prefilled] == [tokens[:1] for tokens in expected]
        assert servers.decoded(prompts, prefilled) == expected
    alone = servers.prefill.answers([(prompt, GREEDY, None) for prompt in prompts])
    assert [tokens for tokens, _ in alone] == expected


@pytest.mark.timeout(600)
def test_a_prompt_whose_prefill_server_was_killed_is_computed(servers: Servers) -> None:
    """The last test of this module: the server is not started again."""
    prompts = prompts_of([40, 200], 9)
    prefilled = servers.prefilled(prompts)
    servers.prefill.kill()
    assert servers.decoded(prompts, prefilled) == generated(servers.model, prompts)
