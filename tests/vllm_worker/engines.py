"""Real vLLM engines, and what transformers says of the same model."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import triton

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
"""`make venv-vllm` makes it."""
PATHS = f"{ROOT}:{Path(__file__).with_name('cheaper')}"
"""Of vLLM's processes. With `FRESH_VLLM` in their environment they are as users have them."""
TOKENS = 8
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
Request = tuple[list[int], dict[str, Any], dict[str, Any] | None]
"""Prompt, fields of SamplingParams, kv_transfer_params."""
Answers = list[tuple[list[int], dict[str, Any] | None]]


_fork_servers: dict[bool, socket.socket] = {}


def _fork_server(v2: bool, home: Path) -> socket.socket:
    """Of a process that has imported vLLM. It ends with this one."""
    if v2 in _fork_servers:
        return _fork_servers[v2]
    assert PYTHON.exists(), "vLLM has an environment of its own: run `make venv-vllm`"
    environment = os.environ | {"PYTHONPATH": PATHS, "HOME": str(home)}
    # vLLM keeps there what it knows of each class of models. To learn it, a process imports all of vLLM.
    environment.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
    if v2:
        (home / "packages").mkdir()
        (home / "packages" / "triton").symlink_to(Path(triton.__file__).parent)
        environment["PYTHONPATH"] += f":{home}/packages"
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    _fork_servers[v2], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [PYTHON, Path(__file__).with_name("vllm_server.py"), str(theirs.fileno())]
        subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    return _fork_servers[v2]


class Server:
    """A process with one engine. Another thread may wait for its lines."""

    def __init__(self, model: Path, *, v2: bool = False, **options: Any) -> None:
        """`v2`: with vLLM's model runner V2, and the Triton of this environment."""
        self.preemptions = self.bounded = 0
        questions, answers = os.pipe(), os.pipe()
        self._questions, self._answers = os.fdopen(questions[1], "w"), os.fdopen(answers[0])
        server = _fork_server(v2, model)
        socket.send_fds(server, [json.dumps([str(model), options]).encode()], [questions[0], answers[1]])
        self.process = psutil.Process(int(server.recv(100)))
        os.close(questions[0])
        os.close(answers[1])

    def line(self) -> str:
        line = self._answers.readline()
        assert line, "vLLM has ended"
        return line

    def answers(self, requests: Sequence[Request]) -> Answers:
        self._questions.write(json.dumps(requests) + "\n")
        self._questions.flush()
        found, self.preemptions, self.bounded = json.loads(self.line())
        return [(tokens, params) for tokens, params in found]

    def kill(self) -> None:
        """Kills all processes of the engine: without a worker, some outlive the first one."""
        children = self.process.children(recursive=True) if self.process.is_running() else []
        for process in [*children, self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._questions.close()
        self._answers.close()


def save_model(where: Path) -> Path:
    """A tiny model with 500 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(where)
    return where


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]


def generated(model: Path, prompts: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    """Greedily, by transformers."""
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        found.append(ids[0, len(prompt) :].tolist())
    return found
