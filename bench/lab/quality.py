"""Does a served model answer as well as the same model in transformers?

A prefill and a decode worker serve the model as real processes. Each form of serving gets the same questions,
in tokens. It gives fixed answers: the right choice and two more questions with theirs. A grammar
(`structured_outputs`) permits nothing else, so the decode worker computes each token, and transformers reads
the same tokens:

    likelihood log probability of an answer, less that of transformers: mean of the pairs, with two standard
               errors to each side
    answer     how far the log probability of a token of an answer is from that of transformers
    kl         Kullback-Leibler divergence, before each token of eight answers, from the distribution of
               transformers: of the 20 most probable tokens and the rest, so it is a lower bound

`….max` is the largest of all tokens.

    float32    the dtype of transformers
    bfloat16   the default on a GPU
    killed     while the engine of the decode worker is killed in the middle of the answers
    drafts     with drafts by lookup
    fp8_kv     KV in 8 bits on both workers
    fp8        weights of 8 bits, the rest in bfloat16
    int4       weights of 4 bits, the rest in bfloat16

What has no dtype here is in float32 on CPUs, and in bfloat16 on GPUs. Transformers computes on the CPU.

`--tasks FILE` takes other questions, a line of JSON each: {"query": …, "choices": […], "gold": index}.
lm-eval makes the same three of a multiple-choice task. A query and a choice are put together as they are.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import torch

from baton.bench.lab.driver import LOGS, Bench, Option, Run
from baton.bench.lab.harness.cluster import LocalCluster, served
from baton.bench.lab.harness.streams import Case, Stream, greedy, new_session, read, until, with_ends
from baton.bench.report import Row
from baton.cluster.model import EMBEDDED_NAME, embedded_path
from baton.router.text.tokenizer import load_tokenizer
from baton.steps.quantiles import percentile
from baton.system.lines import bounded_lines

TASKS = Path(__file__).with_name("quality_tasks.jsonl")
SIMPLE = ("--advanced.num-blocks", "600", "--no-enable-prefix-caching")
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""By device, of forms that name none."""


class Form(NamedTuple):
    """`flags`: of both workers."""

    flags: tuple[str, ...] = ()
    dtype: str | None = None


FORMS = {
    "float32": Form(dtype="float32"),
    "bfloat16": Form(dtype="bfloat16"),
    "killed": Form(),
    "drafts": Form(("--speculative-config", '{"method": "ngram"}')),
    "fp8_kv": Form(("--kv-cache-dtype", "fp8")),
    "fp8": Form(("--quantization", "fp8"), dtype="bfloat16"),
    "int4": Form(("--quantization", "int4"), dtype="bfloat16"),
}
STATEMENTS, KL_ANSWERS = 3, 8
ALTERNATIVES = 20
WAIT_SECONDS = 1800
"""That an answer may take: all begin at once, and a slow machine is no failure."""


class Question(NamedTuple):
    query: list[int]
    text: str
    answer: str
    """The right choice."""


def questions(path: Path, encode: Callable[[str], list[int]], count: int | None) -> list[Question]:
    """The first `count` questions, in tokens. Raises `ValueError` naming the line that has another form."""
    questions = []
    try:
        with path.open("rb") as file:
            lines = [*islice(bounded_lines(file), count)]
    except ValueError as error:
        raise ValueError(f"--tasks {path}: {error}") from None
    for number, line in lines:
        try:
            record = json.loads(line)
            query, choices, gold = record["query"], record["choices"], int(record["gold"])
            questions.append(Question(encode(query), query, choices[gold]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f'--tasks {path}: line {number} is not {{"query", "choices", "gold"}}: {error}'
            ) from error
    return questions


def fixed_answers(tasks: Sequence[Question], encode: Callable[[str], list[int]]) -> list[Case]:
    """A request for each question, whose answer begins with the right choice."""
    cases = []
    for i, question in enumerate(tasks):
        following = (tasks[(i + n) % len(tasks)] for n in range(1, STATEMENTS))
        answer = ". ".join((question.answer, *(each.text + each.answer for each in following)))
        tokens = len(encode(question.text + answer)) - len(question.query)
        cases.append(
            greedy(
                question.query, tokens, logprobs=0, ignore_eos=False, structured_outputs={"choice": [answer]}
            )
        )
    return cases


class Reference:
    """The model in transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        at: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self.tokenizer = load_tokenizer(str(path))
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **at).eval()
        self._known = dict[tuple[int, ...], list[float]]()

    def logprobs(self, ids: Sequence[int], first: int) -> list[float]:
        """Of the tokens from position `first` on. They are kept: most forms of serving give the same."""
        if (known := self._known.get((first, *ids))) is None:
            taken = torch.tensor(ids[first:])[:, None]
            known = self._known[first, *ids] = self.distributions(ids, first).gather(1, taken)[:, 0].tolist()
        return known

    @torch.inference_mode()
    def distributions(self, ids: Sequence[int], first: int) -> torch.Tensor:
        """(tokens, vocabulary): log probabilities before each token from position `first` on."""
        return self._model(torch.tensor([ids])).logits[0, first - 1 : -1].log_softmax(-1)


async def prompt_logprobs(
    http: aiohttp.ClientSession, url: str, ids: list[int], first: int
) -> list[dict[int, float]]:
    """Log probabilities of each token from position `first` on, and of the most probable ones, by token.
    Raises RuntimeError if the server refuses."""
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": ALTERNATIVES}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    if response.status != 200:
        raise RuntimeError(f"the server refused a question: {answer}")
    entries = answer["choices"][0]["prompt_logprobs"]
    return [{int(token): each["logprob"] for token, each in one.items()} for one in entries[first:]]


async def divergences(
    url: str, answers: Sequence[tuple[list[int], int]], reference: Reference
) -> list[float]:
    """In nats, before each token of these answers: (prompt and answer, where it begins)."""
    nats = list[float]()
    async with new_session() as http:
        for ids, first in answers:
            served = await prompt_logprobs(http, url, ids, first)
            nats += map(divergence, reference.distributions(ids, first), served)
    return nats


def divergence(expected: torch.Tensor, served: dict[int, float]) -> float:
    """A lower bound of the Kullback-Leibler divergence of what is served from what is expected: all tokens
    that are not in `served` count as one. `expected`: log probabilities of all tokens."""
    p = expected[list(served)].double().exp()
    q = torch.tensor(list(served.values()), dtype=torch.float64).exp()
    p, q = (torch.cat((each, (1 - each.sum()).clamp(min=1e-12)[None])) for each in (p, q))
    return float((p * (p / q).log()).sum())


async def answered(cluster: LocalCluster, cases: Sequence[Case], *, kill: bool = False) -> list[Stream]:
    """Answers that run side by side. `kill`: the engine of the decode worker dies when half of them have four
    tokens. Raises RuntimeError if one fails."""
    streams = [Stream(case) for case in cases]

    def begun() -> bool:
        if sum(stream.ended > 0 for stream in streams) * 2 > len(streams):
            raise RuntimeError("most answers ended before the engine was killed: measure again")
        return sum(len(stream.token_ids) >= 4 for stream in streams) * 2 >= len(streams)

    async with new_session() as http:
        reading = [asyncio.create_task(read(http, cluster.url, each.case, into=each)) for each in streams]
        if kill:
            await until(begun, reading)
            cluster.of("decode")[0].kill("engine")
        await asyncio.gather(*reading)
    return with_ends(streams)


def measure(run: Run) -> None:
    """A form that fails leaves the others their rows."""
    for path in run.args.model or [embedded_path()]:
        name = path.name.removesuffix(".gguf") if run.args.model else EMBEDDED_NAME
        reference = Reference(path)
        tasks = questions(run.args.tasks or TASKS, reference.tokenizer.encode, 6 if run.short else None)
        for form in run.args.only or FORMS:
            try:
                compare(run, form, f"quality.{name}.{form}".lower(), path, tasks, reference)
            except RuntimeError as error:
                run.failed = True
                print(f"{form}: {error}", file=sys.stderr)


def compare(
    run: Run, form: str, name: str, path: Path, tasks: Sequence[Question], reference: Reference
) -> None:
    """`name`: of the rows."""
    fixed = fixed_answers(tasks, reference.tokenizer.encode)
    patient = ("--advanced.worker-wait", str(WAIT_SECONDS), "--request-timeout", str(WAIT_SECONDS))
    flags, dtype = FORMS[form]
    flags = (*SIMPLE, *flags, "--dtype", dtype or DTYPES[run.device])
    with served(run, *flags, model=str(path), on_cpu=(), name=name, router_flags=patient) as cluster:
        streams = asyncio.run(answered(cluster, fixed, kill=form == "killed"))
        answers = [
            ([*question.query, *stream.token_ids], len(question.query))
            for question, stream in zip(tasks, streams, strict=True)
        ]
        apart = asyncio.run(divergences(cluster.url, answers[:KL_ANSWERS], reference))
        if form == "drafts":
            accepted = cluster.of("decode")[0].metric("vllm:spec_decode_num_accepted_tokens_total")
            run.add(Row(f"{name}.accepted", accepted, "drafts"))
    pairs = [
        np.subtract(stream.logprobs, reference.logprobs(*answer))
        for stream, answer in zip(streams, answers, strict=True)
    ]
    less = [pair.sum() for pair in pairs]
    mean, error = float(np.mean(less)), 2 * float(np.std(less, ddof=1)) / len(less) ** 0.5
    run.add(Row(f"{name}.likelihood", mean, "nats an answer, less", low=mean - error, high=mean + error))
    _add(run, f"{name}.answer", np.abs(np.concatenate(pairs)).tolist())
    _add(run, f"{name}.kl", apart)


def _add(run: Run, name: str, off: Sequence[float]) -> None:
    run.add(Row(name, float(np.mean(off)), "nats a token, mean", p99=percentile(off, 0.99)))
    run.add(Row(f"{name}.max", float(np.max(off)), "nats"))


BENCH = Bench(
    "quality",
    measure,
    __doc__,
    options=(
        Option(
            "--model",
            "a folder or a file of GGUF; may be repeated (default: the embedded model)",
            action="append",
            type=Path,
            metavar="PATH",
        ),
        Option("--tasks", "questions (default: 48 of its own)", type=Path, metavar="FILE"),
        Option("--only", "this form of serving; may be repeated", action="append", choices=FORMS),
        LOGS,
    ),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
