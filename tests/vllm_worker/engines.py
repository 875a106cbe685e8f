"""Real vLLM engines, and what transformers says of the same model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import triton

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
"""`make venv-vllm` makes it."""
TOKENS = 8
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
Request = tuple[list[int], dict[str, Any], dict[str, Any] | None]
"""Prompt, fields of SamplingParams, kv_transfer_params."""
Answers = list[tuple[list[int], dict[str, Any] | None]]


class Server:
    """A process with one engine. Another thread may wait for its lines."""

    def __init__(self, model: Path, *, v2: bool = False, **options: Any) -> None:
        """`v2`: with vLLM's model runner V2, and the Triton of this environment."""
        assert PYTHON.exists(), "vLLM has an environment of its own: run `make venv-vllm`"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(model)}
        # vLLM keeps there what it knows of each class of models. To learn it, a process imports all of vLLM.
        environment.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
        if v2:
            (packages := Path(tempfile.mkdtemp(dir=model)) / "triton").symlink_to(
                Path(triton.__file__).parent
            )
            environment["PYTHONPATH"] += f":{packages.parent}"
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
            environment["TORCH_COMPILE_DISABLE"] = "1"  # torch would compile for that Triton
        self.preemptions = 0
        self.process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("vllm_server.py"), model, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"vLLM ended with exit code {self.process.wait()}"
        return line

    def answers(self, requests: Sequence[Request]) -> Answers:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(requests) + "\n")
        self.process.stdin.flush()
        found, self.preemptions = json.loads(self.line())
        return [(tokens, params) for tokens, params in found]

    def kill(self) -> None:
        """Kills all processes of the engine: without a worker, some outlive the first one."""
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
        self.process.kill()
        self.process.communicate()


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
