"""Real vLLM engines, and what transformers says of the same model."""

import contextlib
import functools
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import triton

from tests.device import DEVICE
from tests.forked import ForkedPopen
from tests.forked.popen import VLLM_PYTHON

ROOT = Path(__file__).parents[2]
PYTHON = Path(VLLM_PYTHON if DEVICE == "cpu" else sys.executable)
"""`make venv-vllm` makes it. For GPUs vLLM is where Baton is."""
VISION = PYTHON.parents[1] / "vision"
"""What vLLM's processors of images import. That takes time, and no other test needs it."""
PATHS = (
    f"{ROOT}:{Path(__file__).with_name('cheaper') if DEVICE == 'cpu' else os.environ.get('PYTHONPATH', '')}"
)
"""Of vLLM's processes. With `FRESH_VLLM` in their environment, and on GPUs, they are as users have them."""
TOKENS = 8
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
Request = tuple[list[int], dict[str, Any], dict[str, Any] | None]
"""Prompt, fields of SamplingParams, kv_transfer_params."""
Answers = list[tuple[list[int], dict[str, Any] | None]]


@functools.cache
def _with_triton() -> tempfile.TemporaryDirectory[str]:
    """A directory from which Python imports the Triton of this environment."""
    packages = tempfile.TemporaryDirectory()
    (Path(packages.name) / "triton").symlink_to(Path(triton.__file__).parent)
    return packages


def _environment(v2: bool, home: Path, drafts: dict[str, Any]) -> dict[str, str]:
    assert PYTHON.exists(), "vLLM has an environment of its own: run `make venv-vllm`"
    environment = os.environ | {
        "PYTHONPATH": PATHS,
        "HOME": str(home),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines and ranks share the CPUs
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # vLLM keeps there what it knows of each class of models. To learn it, a process imports all of vLLM.
    environment.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
    if drafts.get("method") == "ngram":
        environment["PYTHONPATH"] += f":{Path(__file__).with_name('plain_numba')}"
    if v2:
        environment["PYTHONPATH"] += f":{_with_triton().name}"
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return environment


class Server:
    """A process with one engine. Another thread may wait for its lines."""

    def __init__(self, model: Path, *, v2: bool = False, **options: Any) -> None:
        """`v2`: with vLLM's model runner V2, and the Triton of this environment."""
        self.preemptions = self.cached = self.accepted = self.bounded = 0
        questions, answers = os.pipe(), os.pipe()
        self._questions, self._answers = os.fdopen(questions[1], "w"), os.fdopen(answers[0])
        given = [str(model), json.dumps(options), str(questions[0]), str(answers[1])]
        environment = _environment(v2, model, options.get("speculative_config", {}))
        self._popen = ForkedPopen(
            [VLLM_PYTHON, "-m", "tests.vllm_worker.vllm_server", *given],
            env=environment, pass_fds=(questions[0], answers[1]),
        )  # fmt: skip
        self.process = psutil.Process(self._popen.pid)
        os.close(questions[0])
        os.close(answers[1])

    def line(self) -> str:
        line = self._answers.readline()
        assert line, "vLLM has ended"
        return line

    def answers(self, requests: Sequence[Request]) -> Answers:
        self._questions.write(json.dumps(requests) + "\n")
        self._questions.flush()
        found, self.preemptions, self.cached, self.accepted, self.bounded = json.loads(self.line())
        return [(tokens, params) for tokens, params in found]

    def kill(self) -> None:
        """Kills all processes of the engine: without a worker, some outlive the first one."""
        children = self.process.children(recursive=True) if self.process.is_running() else []
        for process in [*children, self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()
        self._questions.close()
        self._answers.close()


def save_model(where: Path, kind: str = "Llama", **changes: Any) -> Path:
    """A tiny random model of this kind, with 500 tokens."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 500, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "initializer_range": 0.1,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(where)
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
