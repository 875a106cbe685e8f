"""Drafts of tokens: what they gain, what they cost, and that they change no stream.

On CPUs the embedded model with prompt lookup, in turns with the same engine without drafts. `copying` repeats
a text of its prompt, `free` writes text of its own. `different` counts tokens that differ, in float32.

On a GPU the 8B Llama shape with random weights, whose tokens no drafter could guess. So `accepted` sets which
drafts count as right: each with 0.7, if the one before was. `never` accepts none. A row `step` is a step with
four tokens of each request, over one with one.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from baton.bench.lab.driver import MIN_PAIRS, Bench, Option, Run
from baton.bench.lab.engine.drive import answers, drain, steady
from baton.bench.lab.shapes import DENSE, write_shape
from baton.bench.report import Row
from baton.cluster.model import embedded_path
from baton.engine import Engine, EngineConfig, EngineRequest, SamplingParams, SpeculativeConfig, build_engine
from baton.engine.core.draft_counts import StepCosts
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.speculation import PromptLookup
from baton.engine.kernels import Kernels
from baton.engine.layers.ranks import unsharded
from baton.engine.layers.weights import Weights
from baton.engine.models.draft_heads import DRAFT_HEADS, DraftHead, Eagle3, HeadConfig
from baton.engine.models.llama import Llama

TEXT = (
    "The harbour of the old town opens to the north. In winter the fishing boats stay inside for weeks, and "
    "the men mend their nets in the long sheds behind the church. Every Saturday a small ferry brings "
    "letters, flour and newspapers from the mainland. The children wait on the pier, because the captain "
    "always has a bag of oranges for them. When the ice breaks in March, the first boat leaves before dawn."
)
QUESTIONS = (
    "Write a short story about a fox and a clock.",
    "Explain how a bicycle stays upright.",
    "Describe a market in a mountain village.",
)
SHORT, LONG = 64, 96
"""Tokens of an answer."""
ACCEPTED = 0.7
CONTEXT = 1064
BATCHES = 1, 8, 32, 64, 128, 256
GOALS = {1: (1.08, 2.2), 8: (1.12, 2.1), 32: (1.25, 1.8)}
"""By batch: a step with four tokens over one with one, and tokens/s over those without drafts."""
NEVER = 0.98
KNOWN = 32_000
"""Tokens that an EAGLE-3 head knows."""


def on_cpu(run: Run) -> None:
    from baton.router.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(embedded_path()))
    copying = tokenizer.encode(f"{TEXT}\n\n" * 4 + TEXT[:100])
    free = [tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n") for q in QUESTIONS]
    tokens, pairs = (SHORT, MIN_PAIRS) if run.short else (LONG, 9)
    with_drafts, without = (_embedded(speculative) for speculative in (SpeculativeConfig(), None))
    for name, prompts, sampling, goal in (
        ("copying", [copying], {"temperature": 0.0}, 1.6),
        ("free", free, {"temperature": 0.8}, 0.98),
    ):
        speed = partial(_tokens_per_s, prompts=prompts, max_tokens=tokens, **sampling)
        speed(with_drafts), speed(without)
        run.compare(
            f"speculation.cpu.{name}", partial(speed, with_drafts), "tokens/s", partial(speed, without),
            "the same without drafts", pairs=pairs, goal=goal, better="higher",
        )  # fmt: skip
    stats = with_drafts.stats().speculation
    assert stats is not None
    run.add(Row("speculation.cpu.accepted", stats.accepted / max(1, stats.drafts), "of drafts"))
    exact = [_embedded(speculative, dtype="float32") for speculative in (SpeculativeConfig(), None)]
    requests = [
        _request(n, ids, 48, temperature=t) for n, ids in enumerate([copying, *free]) for t in (0.0, 0.8)
    ]
    one, other = (answers(engine, requests) for engine in exact)
    differ = sum(a != b for seq, ref in zip(one, other, strict=True) for a, b in zip(seq, ref, strict=True))
    run.add(Row("speculation.cpu.different", differ, f"of {sum(map(len, one))} tokens", goal=0))


def _embedded(speculative: SpeculativeConfig | None, **config: Any) -> Engine:
    return build_engine(
        EngineConfig(
            str(embedded_path()),
            num_blocks=512,
            enable_prefix_caching=True,
            speculative_config=speculative,
            **config,
        )
    )


def _request(number: int, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number, **sampling)
    return EngineRequest(number.to_bytes(8) + bytes(f"{sampling}", "utf8"), list(prompt), sampling=params)


def _tokens_per_s(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any
) -> float:
    """Of each prompt alone, after its first token."""
    seconds = 0.0
    for number, prompt in enumerate(prompts):
        engine.add(_request(number, prompt, max_tokens, **sampling))
        while not engine.loop.step().outputs:
            pass
        began = time.perf_counter()
        drain(engine)
        seconds += time.perf_counter() - began
    return len(prompts) * (max_tokens - 1) / seconds


class _Set(PromptLookup):
    """Always has drafts, and takes the time of prompt lookup."""

    def propose(self, live: LiveRequest, drafts: Sequence[int], count: int) -> Sequence[int]:
        return super().propose(live, drafts, count) or [0] * count


def _set_acceptance(device: torch.device, kernels: type[Kernels]) -> Tensor:
    """From now on, engines accept each draft with the probability in the result, whatever it is. Their graphs
    read it, so it may change later."""
    share = torch.zeros((), device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)

    def accepted(tokens: Tensor, rows: Tensor, drafts: Tensor, resolved: Tensor) -> Tensor:
        index = torch.arange(len(tokens), device=device)
        count.add_(1)
        random = ((count * 7919 + index) * 2654435761 % 4294967291) * 40503 % 65521 / 65521.0
        wrong = torch.where((drafts > 0) & (random < share), len(tokens), index)
        return wrong.flip(0).cummin(0).values.flip(0) - index

    kernels.accepted = staticmethod(accepted)
    return share


def on_cuda(run: Run) -> None:
    from baton.engine.kernels.triton_kernels import TritonKernels

    share, method = _set_acceptance(torch.device("cuda"), TritonKernels), run.args.method
    steps, pairs = (32, MIN_PAIRS) if run.short else (128, 7)
    path = write_shape(DENSE, run.directory)
    config: dict[str, Any] = {
        "dtype": "bfloat16", "device": "cuda", "load_format": "dummy", "max_model_len": 4096,
        "max_num_seqs": 256, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.45,
        "enable_prefix_caching": True,  # so that only the first run of a batch computes its prompts
    }  # fmt: skip
    without = build_engine(EngineConfig(str(path), **config))
    speculative = SpeculativeConfig(method, model=str(_eagle(path)) if method == "eagle3" else "")
    config["gpu_memory_utilization"] *= 2  # what this process has already counts for the second engine
    drafting = build_engine(EngineConfig(str(path), **config, speculative_config=speculative))
    speculation = drafting.scheduler.speculation
    assert speculation is not None
    if method == "ngram":
        speculation.drafter = _Set(speculative)
    costs, acceptance = speculation.costs, speculation._acceptance

    def part(engine: Engine, batch: int, number: int) -> Callable[[], float]:
        """Tokens/s, or seconds of a step."""
        return lambda: steady(engine, batch, CONTEXT, steps, 4 * (steps + 24))[number]

    for batch in BATCHES:
        step, gain = GOALS.get(batch, (None, None))
        share.fill_(0.0)
        if step is not None:
            speculation.costs, speculation._acceptance = _Free(costs.sizes.tolist()), lambda live: 1.0
            run.compare(
                f"speculation.cuda.step.b{batch}", part(drafting, batch, 1), "ms", part(without, batch, 1),
                "a token each", pairs=MIN_PAIRS, scale=1e3, goal=step,
            )  # fmt: skip
            speculation.costs, speculation._acceptance = costs, acceptance
        for kind, accepted, goal in (("accepted", ACCEPTED, gain), ("never", 0.0, NEVER)):
            share.fill_(accepted)
            speculation._tested = speculation._right = 0.0  # of another workload
            part(drafting, batch, 0)()
            run.compare(
                f"speculation.cuda.{kind}.b{batch}", part(drafting, batch, 0), "tokens/s",
                part(without, batch, 0), "none", pairs=pairs, goal=goal, better="higher",
            )  # fmt: skip
    for engine in (drafting, without):
        engine.close()


class _Published(Eagle3):
    """Knows as many tokens as published heads do."""

    def __init__(self, config: HeadConfig, weights: Weights, target: Llama) -> None:
        super().__init__(config, weights, target)
        self.project = weights.linear(["lm_head"], [unsharded(KNOWN)], unsharded(config.model.hidden_size))
        self.token_ids = torch.arange(KNOWN, device=target.norm.weight.device)


def _eagle(model: Path) -> Path:
    """The shape of an EAGLE-3 head for this model. Its weights are random."""
    cast(dict[str, type[DraftHead]], DRAFT_HEADS)["eagle3"] = _Published
    head = model / "head"
    head.mkdir()
    settings = json.loads((model / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 1}))
    return head


class _Free(StepCosts):
    """Steps cost the same, so all drafts are taken."""

    def is_known(self, rows: int) -> bool:
        return True

    def seconds(self, rows: int) -> np.ndarray:
        return np.ones(len(self.sizes) - self.index(rows))


BENCH = Bench(
    "speculation",
    lambda run: (on_cuda if run.on_gpus else on_cpu)(run),
    __doc__,
    options=(Option("--method", "on a GPU, what drafts", "ngram", choices=("ngram", "eagle3")),),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
