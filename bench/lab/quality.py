"""Does a served model answer as well as the same model in transformers?

A prefill and a decode worker serve the embedded model as real processes. Each form of serving gets the same
questions, in tokens:

    accuracy   share of multiple-choice questions whose right choice has the largest sum of log probabilities,
               as lm-eval's `acc`. They are those of a prompt
    generated  share of questions whose right choice a greedy answer begins with, as in lm-eval
    prompt     how far the log probability of a token of a choice is from that of transformers
    answer     the same of tokens that the decode worker gives, greedily: transformers reads the same tokens
    kl         Kullback-Leibler divergence, before each token of these answers, from the distribution of
               transformers: of the 20 most probable tokens and the rest, so it is a lower bound

`….max` is the largest of all tokens.

    float32    the dtype of transformers
    killed     the same, while the engine of the decode worker is killed in the middle of the answers
    fp8_kv     KV in 8 bits on both workers
    int4       weights of 4 bits, the rest in bfloat16

`--tasks FILE` takes other questions, a line of JSON each: {"query": …, "choices": […], "gold": index}.
lm-eval makes the same three of a multiple-choice task. A query and a choice are put together as they are.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import torch

from baton.bench.lab.driver import Bench, Option, Run
from baton.bench.lab.harness.cluster import LocalCluster, served
from baton.bench.lab.harness.streams import Case, Stream, new_session, read, until
from baton.bench.report import Row
from baton.cluster.model import embedded_path
from baton.steps.quantiles import percentile
from baton.system.lines import bounded_lines

TASKS = Path(__file__).with_name("quality_tasks.jsonl")
SIMPLE = ("--advanced.num-blocks", "600", "--no-enable-prefix-caching")
FORMS: dict[str, tuple[str, ...]] = {
    "float32": ("--dtype", "float32"),
    "killed": ("--dtype", "float32"),
    "fp8_kv": ("--dtype", "float32", "--kv-cache-dtype", "fp8"),
    "int4": ("--dtype", "bfloat16", "--quantization", "int4"),
}
ANSWERS, ANSWER_TOKENS = 8, 24
GENERATED_TOKENS = 6
"""Of an answer to a question: a choice has at most three."""
ALTERNATIVES = 20
AT_ONCE = 16


class Question(NamedTuple):
    query: list[int]
    choices: list[list[int]]
    gold: int
    answer: str
    """The right choice."""


def questions(path: Path, tokenizer: Any, count: int | None) -> list[Question]:
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
            choice_ids = [tokenizer(query + choice)["input_ids"] for choice in choices]
            questions.append(Question(tokenizer(query)["input_ids"], choice_ids, gold, choices[gold]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f'--tasks {path}: line {number} is not {{"query", "choices", "gold"}}: {error}'
            ) from error
    return questions


class Reference:
    """The model in transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        self._model: Any = model.eval()

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int], first: int) -> list[float]:
        """Of the tokens from position `first` on."""
        return self.distributions(ids, first).gather(1, torch.tensor(ids[first:])[:, None])[:, 0].tolist()

    @torch.inference_mode()
    def distributions(self, ids: Sequence[int], first: int) -> torch.Tensor:
        """(tokens, vocabulary): log probabilities before each token from position `first` on."""
        return self._model(torch.tensor([ids])).logits[0, first - 1 : -1].log_softmax(-1)

    @torch.inference_mode()
    def answer(self, ids: Sequence[int], tokens: int) -> str:
        """A greedy one."""
        input_ids = torch.tensor([ids])
        output_ids = self._model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=tokens, do_sample=False
        )
        return self.tokenizer.decode(output_ids[0, len(ids) :])


async def prompt_logprobs(
    http: aiohttp.ClientSession, url: str, ids: list[int], first: int, alternatives: int = 0
) -> list[dict[int, float]]:
    """Log probabilities of each token from position `first` on, and of so many alternatives, by token. Raises
    RuntimeError if the server refuses."""
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": alternatives}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    if response.status != 200:
        raise RuntimeError(f"the server refused a question: {answer}")
    entries = answer["choices"][0]["prompt_logprobs"]
    return [{int(token): each["logprob"] for token, each in one.items()} for one in entries[first:]]


async def scored(url: str, tasks: Sequence[Question]) -> list[list[list[float]]]:
    """The log probabilities of the tokens of each choice of each question."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(http: aiohttp.ClientSession, question: Question, choice: list[int]) -> list[float]:
        async with gate:
            first = len(question.query)
            logprobs = await prompt_logprobs(http, url, choice, first)
            return [each[token] for each, token in zip(logprobs, choice[first:], strict=True)]

    async with new_session() as http:
        return [
            await asyncio.gather(*(one(http, question, choice) for choice in question.choices))
            for question in tasks
        ]


async def divergences(
    url: str, answers: Sequence[tuple[list[int], int]], reference: Reference
) -> list[float]:
    """In nats, before each token of these answers: (prompt and answer, where it begins)."""
    nats = list[float]()
    async with new_session() as http:
        for ids, first in answers:
            served = await prompt_logprobs(http, url, ids, first, ALTERNATIVES)
            nats += map(divergence, reference.distributions(ids, first), served)
    return nats


def divergence(expected: torch.Tensor, served: dict[int, float]) -> float:
    """A lower bound of the Kullback-Leibler divergence of what is served from what is expected: all tokens
    that are not in `served` count as one. `expected`: log probabilities of all tokens."""
    p = expected[list(served)].double().exp()
    q = torch.tensor(list(served.values()), dtype=torch.float64).exp()
    p, q = (torch.cat((each, (1 - each.sum()).clamp(min=1e-12)[None])) for each in (p, q))
    return float((p * (p / q).log()).sum())


def right(scores: Sequence[Sequence[Sequence[float]]], tasks: Sequence[Question]) -> list[bool]:
    return [
        int(np.argmax([sum(choice) for choice in choices])) == question.gold
        for choices, question in zip(scores, tasks, strict=True)
    ]


async def answered(
    cluster: LocalCluster, prompts: Sequence[list[int]], tokens: int = ANSWER_TOKENS, *, kill: bool = False
) -> list[Stream]:
    """Greedy answers that run side by side. `kill`: the engine of the decode worker dies when each has four
    tokens. Raises RuntimeError if one fails."""
    cases = [
        Case("", tokens, temperature=0.0, seed=1, options=json.dumps({"prompt": prompt, "logprobs": 0}))
        for prompt in prompts
    ]
    streams = [Stream(case) for case in cases]

    def begun() -> bool:
        if any(stream.ended for stream in streams):
            raise RuntimeError("an answer ended before the engine was killed: measure again")
        return all(len(stream.token_ids) >= 4 for stream in streams)

    async with new_session() as http:
        reading = [asyncio.create_task(read(http, cluster.url, each.case, into=each)) for each in streams]
        if kill:
            await until(begun, reading)
            cluster.of("decode")[0].kill("engine")
        await asyncio.gather(*reading)
    if failed := [stream.error for stream in streams if stream.failed]:
        raise RuntimeError(f"an answer failed: {failed[0]}")
    return streams


def measure(run: Run) -> None:
    path = embedded_path()
    reference = Reference(path)
    tasks = questions(run.args.tasks or TASKS, reference.tokenizer, 6 if run.short else None)
    expected = [
        [reference.logprobs(choice, len(question.query)) for choice in question.choices] for question in tasks
    ]
    for form in [run.args.only] if run.args.only else FORMS:
        compare(run, form, path, tasks, expected, reference)


def compare(
    run: Run,
    form: str,
    path: Path,
    tasks: Sequence[Question],
    expected: Sequence[Sequence[Sequence[float]]],
    reference: Reference,
) -> None:
    """`expected`: the log probabilities of the tokens of each choice in transformers."""
    best = sum(right(expected, tasks)) / len(tasks)
    with served(run, *SIMPLE, model=str(path), on_cpu=FORMS[form], name=form) as cluster:
        prompts = [question.choices[question.gold] for question in tasks[:ANSWERS]]
        streams = asyncio.run(answered(cluster, prompts, kill=form == "killed"))
        scores = asyncio.run(scored(cluster.url, tasks))
        generated = asyncio.run(answered(cluster, [each.query for each in tasks], GENERATED_TOKENS))
        answers = [
            ([*prompt, *each.token_ids], len(prompt)) for prompt, each in zip(prompts, streams, strict=True)
        ]
        apart = asyncio.run(divergences(cluster.url, answers, reference))
    name = f"quality.{form}"
    share = sum(right(scores, tasks)) / len(tasks)
    run.add(Row(f"{name}.accuracy", share, "share", ratio=share / best, ratio_to="transformers"))
    reference_texts = [reference.answer(each.query, GENERATED_TOKENS) for each in tasks]
    hits, best = (
        sum(text.strip().startswith(each.answer.strip()) for text, each in zip(texts, tasks, strict=True))
        for texts in ([stream.text for stream in generated], reference_texts)
    )
    ratio = hits / best if best else None
    run.add(Row(f"{name}.generated", hits / len(tasks), "share", ratio=ratio, ratio_to="transformers"))
    pairs = zip(flat(scores), flat(expected), strict=True)
    _add(run, f"{name}.prompt", [abs(a - b) for a, b in pairs])
    off = list[float]()
    for (ids, first), stream in zip(answers, streams, strict=True):
        off += [abs(a - b) for a, b in zip(stream.logprobs, reference.logprobs(ids, first), strict=True)]
    _add(run, f"{name}.answer", off)
    _add(run, f"{name}.kl", apart)


def flat(scores: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    return [x for choices in scores for choice in choices for x in choice]


def _add(run: Run, name: str, off: Sequence[float]) -> None:
    run.add(Row(name, float(np.mean(off)), "nats a token, mean", p99=percentile(off, 0.99)))
    run.add(Row(f"{name}.max", float(np.max(off)), "nats"))


BENCH = Bench(
    "quality",
    measure,
    __doc__,
    options=(
        Option("--tasks", "questions (default: 48 of its own)", type=Path, metavar="FILE"),
        Option("--only", "this form of serving", choices=FORMS),
    ),
    devices=("cpu",),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
