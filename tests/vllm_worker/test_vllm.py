"""Two real vLLM engines with the connector give the tokens of one vLLM, and of transformers."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
"""`make venv-vllm` makes it."""
TOKENS = 8
PREFILL: dict[str, Any] = {"do_remote_decode": True}
Answers = list[tuple[list[int], dict[str, Any] | None]]


class Server:
    def __init__(self, model: Path, *role: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(model)}
        self.process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("vllm_server.py"), model, *role],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"vLLM ended with exit code {self.process.wait()}"
        return line

    def answers(self, requests: list[tuple[list[int], int, dict[str, Any] | None]]) -> Answers:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(requests) + "\n")
        self.process.stdin.flush()
        return [(tokens, params) for tokens, params in json.loads(self.line())]


class Servers:
    def __init__(self, model: Path) -> None:
        self.model = model
        self.alone, self.prefill, self.decode = (
            Server(model), Server(model, "kv_producer"), Server(model, "kv_consumer"),
        )  # fmt: skip

    def prefilled(self, prompts: list[list[int]]) -> Answers:
        return self.prefill.answers([(prompt, 1, PREFILL) for prompt in prompts])

    def decoded(self, prompts: list[list[int]], prefilled: Answers) -> list[list[int]]:
        """As a proxy that was made for NixlConnector: with the parameters that the prefill server gave."""
        requests = [(prompt, TOKENS, params) for prompt, (_, params) in zip(prompts, prefilled, strict=True)]
        return [tokens for tokens, _ in self.decode.answers(requests)]

    def expected(self, prompts: list[list[int]]) -> list[list[int]]:
        return [tokens for tokens, _ in self.alone.answers([(prompt, TOKENS, None) for prompt in prompts])]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    assert PYTHON.exists(), "vLLM has an environment of its own: run `make venv-vllm`"
    from transformers import LlamaConfig, LlamaForCausalLM

    model = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    started = Servers(model)
    processes = (started.alone, started.prefill, started.decode)
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.line, processes))
        yield started
    finally:
        for server in processes:
            server.process.kill()
            server.process.communicate()


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]


MANY = [random.Random(0).randrange(3, 2000) for _ in range(26)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "lengths",
    [[3, 128, 129, 300, 700], pytest.param([3, 127, 1500, 2000, *MANY], marks=pytest.mark.long)],
    ids=["five", "thirty"],
)
def test_tokens_are_those_of_one_engine(servers: Servers, lengths: list[int]) -> None:
    """Long prompts are computed in chunks. The second time both servers have the first blocks in their prefix
    caches. The connector of a source that has ended costs time alone."""
    prompts = prompts_of(lengths, len(lengths))
    expected = servers.expected(prompts)
    for _ in range(2):
        prefilled = servers.prefilled(prompts)
        assert [tokens for tokens, _ in prefilled] == [tokens[:1] for tokens in expected]
        assert servers.decoded(prompts, prefilled) == expected
    assert expected == generated(servers.model, prompts)


def generated(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import LlamaForCausalLM

    reference: Any = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
            )
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.mark.timeout(600)
def test_a_prompt_whose_prefill_server_was_killed_is_computed(servers: Servers) -> None:
    """The last test of this module: the server is not started again."""
    prompts = prompts_of([40, 200], 9)
    expected, prefilled = servers.expected(prompts), servers.prefilled(prompts)
    servers.prefill.process.kill()
    servers.prefill.process.wait()
    assert servers.decoded(prompts, prefilled) == expected
