"""What the later turns of agents wait for: their time to the first token, summed by cause.

Baton serves agents (`baton bench agents`), and writes what each step computed (`--advanced.trace-dir`). All
processes share a clock. So each turn's seconds, from its request to its first token at the client, have one
cause each:

router     HTTP, tokens, the plan, and the message to the worker; also attempts before the one with the token
admission  the admission queue of the router
prefix     KV of the prompt comes from another worker, or there is no room
steps      steps that only decode, before the first one with a part of the prompt: the one that is under way,
           and one that was launched behind it
queue      steps with other prompts before that, or KV comes from a tier
computing  what the new tokens cost alone, as the worker reports its steps
beside     the rest of the steps from the first part of the prompt to its token: decodes and other prompts in
           them, and further parts, since a step keeps to the gap target
answer     from the worker to the client

A row of a cause has the quantiles of all later turns, and its share of all their seconds. `client` is no
further cause: it is the part of `router` and `answer` before the router had the request, and after it had
sent the token. The detail of the report has each turn, the first ones (0) of sessions, too.
"""

import json
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from baton.bench.lab.disagg.__main__ import ON_DEVICE, run
from baton.bench.lab.disagg.loads import LOADS, Load, command, warm_up
from baton.bench.lab.driver import LOGS, Bench, Option, Run
from baton.bench.lab.harness.sides import SERVE, Side, started, watched
from baton.bench.lab.overlap.streams import events
from baton.bench.lab.shapes import DENSE, SHAPES, write_shape
from baton.bench.report import Row
from baton.router.workers.checks import step_model
from baton.rpc import worker_pb2 as pb
from baton.steps.quantiles import percentile
from baton.steps.step_model import StepModel

CAUSES = ("router", "admission", "prefix", "steps", "queue", "computing", "beside", "answer")


class Step(NamedTuple):
    """Seconds of CLOCK_MONOTONIC, as all times here."""

    start: float
    end: float
    prompts: Mapping[str, range]
    """By attempt, the positions that it computed."""


class Prompt(NamedTuple):
    """An attempt that has computed a first token."""

    name: str
    attempt: str
    accepted: float
    """When the service process of the worker had it."""
    taken: float
    """When its engine process had it."""
    added: float
    """When the engine had it, with all KV that it need not compute."""
    token: float


class Worker(NamedTuple):
    name: str
    steps: Sequence[Step]
    prompts: Sequence[Prompt]


def read(path: Path) -> Worker:
    """The trace of an engine process that has ended."""
    steps, prompts = list[Step](), list[Prompt]()
    accepted, taken, added = dict[str, float](), dict[str, float](), dict[str, float]()
    for event in events(path):
        at, fields = event.get("ts", 0.0) / 1e6, event["args"]
        match event["name"]:
            case "step":
                parts = {attempt: range(start, stop) for attempt, start, stop in fields["prompts"]}
                steps.append(Step(at, at + event["dur"] / 1e6, parts))
            case "queued":
                accepted[fields["request"]] = at
            case "taken":
                taken[fields["attempt"]] = at
            case "added":
                added[fields["attempt"]] = at
            case "first token":
                attempt = fields["prefill"]
                if attempt in added and attempt in accepted:  # else it had a part of a split prompt
                    times = accepted[attempt], taken[attempt], added[attempt]
                    prompts.append(Prompt(fields["request"], attempt, *times, at))
    return Worker(path.stem.removesuffix("-engine"), steps, prompts)


def within(steps: Iterable[Step], start: float, stop: float) -> tuple[float, float]:
    """The seconds of this time in steps that only decode, and in those with prompts."""
    decodes = prompts = 0.0
    for step in steps:
        seconds = max(0.0, min(step.end, stop) - max(step.start, start))
        if step.prompts:
            prompts += seconds
        else:
            decodes += seconds
    return decodes, prompts


def causes(
    prompt: Prompt,
    steps: Sequence[Step],
    model: StepModel | None,
    sent: float,
    admission: float,
    first: float,
) -> dict[str, float]:
    """The seconds of each cause. `steps`: of the worker, in order. `admission`: seconds in the queue of the
    router. `first`: when the client had the token."""
    near = steps[bisect_right(steps, prompt.accepted, key=lambda step: step.end) :]
    near = near[: bisect_right(near, prompt.token, key=lambda step: step.start)]
    own = [step for step in near if prompt.attempt in step.prompts]
    begins = max(own[0].start if own else prompt.token, prompt.added)
    to_read, to_read_prompts = within(near, prompt.accepted, prompt.taken)
    to_begin, _ = within(near, prompt.added, begins)
    parts = [step.prompts[prompt.attempt] for step in own]
    alone = took = prompt.token - begins
    if model is not None and parts:
        alone = min(took, model.prompt(sum(map(len, parts)), parts[0].start))
    seconds = {
        "router": prompt.taken - sent - admission - to_read - to_read_prompts,
        "admission": admission,
        "prefix": prompt.added - prompt.taken,
        "steps": to_read + to_begin,
        "queue": to_read_prompts + begins - prompt.added - to_begin,
        "computing": alone,
        "beside": took - alone,
        "answer": first - prompt.token,
    }
    return {cause: seconds[cause] for cause in CAUSES}


def turns_of(
    workers: Iterable[Worker],
    models: Mapping[str, StepModel | None],
    logged: Mapping[str, tuple[float, float]],
    records: Iterable[Mapping[str, Any]],
    began: float,
) -> Iterator[dict[str, Any]]:
    """Yields the turns whose first token a traced step has computed: number, worker, tokens that were
    computed, and seconds by cause. `logged`: as of `logged_in`. `began`: when the records begin to count."""
    found: dict[str, tuple[Prompt, Worker]] = {}
    for worker in workers:
        for prompt in worker.prompts:
            if prompt.name not in found or prompt.token < found[prompt.name][0].token:
                found[prompt.name] = prompt, worker
    for record in records:
        if not record["arrivals"] or record["name"] not in found.keys() & logged:
            continue
        prompt, worker = found[record["name"]]
        sent, first = began + record["sent"], began + record["arrivals"][0]
        admission, in_router = logged[prompt.name]
        yield {
            "turn": record["turn"],
            "worker": worker.name,
            "tokens": record["prompt_tokens"] - record["cached_tokens"],
            "ttft": first - sent,
            **causes(prompt, worker.steps, models[worker.name], sent, admission, first),
            "client": first - sent - in_router,
        }


def models_of(status: Path) -> dict[str, StepModel | None]:
    """What steps cost each worker in the end, by its name."""
    workers = json.loads(status.read_text().splitlines()[-1])["workers"]
    reports = {f"{each['role']}-{each['index']}": each["status"]["step_model"] for each in workers}
    return {name: None if x is None else step_model(pb.StepModel(**x)) for name, x in reports.items()}


def logged_in(logs: Path) -> dict[str, tuple[float, float]]:
    """Seconds in the queue of the router, and of the router until the first token, by request, from its
    logs."""
    texts = (path.read_text() for path in logs.glob("router-*.log*"))
    lines = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
    return {
        line["request_id"]: (line["queue_seconds"], line["first_token_seconds"])
        for line in lines
        if "queue_seconds" in line
    }


def rows(name: str, turns: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    total = sum(turn["ttft"] for turn in turns)
    for cause in ("ttft", *CAUSES, "client"):
        values = [turn[cause] for turn in turns]
        for quantile in (50, 90):
            yield Row(f"{name}.{cause}.p{quantile}", 1e3 * percentile(values, quantile / 100), "ms")
        yield Row(f"{name}.{cause}.share", sum(values) / total, "of the seconds")
    for worker, count in Counter(turn["worker"] for turn in turns).items():
        yield Row(f"{name}.on.{worker}", count / len(turns), "of the turns")


def measure_level(run_: Run, load: Load, level: float, model: Path) -> None:
    args, directory = run_.args, run_.logs / load.name_at(level)
    directory.mkdir(parents=True, exist_ok=True)
    serve = SERVE + ON_DEVICE[args.device].replace("{context}", str(load.context))
    files = f"--log-dir {directory} --log-format json --advanced.trace-dir {directory}"
    report, lines = directory / "load.json", directory / "load.jsonl"
    with started(Side("baton", 1, f"{serve} {files} {args.serve}"), model) as servers:
        [url] = servers
        for arguments in warm_up(load, args.seed):
            run(url, arguments, report)
        with watched([url], directory / "status.jsonl"):
            run(url, [*command(load, level, 0, args.seed, directory), "--advanced.jsonl", str(lines)], report)
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    turns = [
        *turns_of(
            map(read, directory.glob("*-engine.trace")),
            models_of(directory / "status.jsonl"),
            logged_in(directory),
            records,
            json.loads(report.read_text())["detail"]["started_at"],
        )
    ]
    name = f"turns.{load.name_at(level)}"
    run_.detail[name] = turns
    later = [turn for turn in turns if turn["turn"]]
    run_.add(Row(f"{name}.turns", len(later), "turns"))
    run_.add(Row(f"{name}.untraced", sum(bool(r["turn"]) for r in records) - len(later), "turns"))
    for row in rows(name, later) if later else ():
        run_.add(row)


def measure(run_: Run) -> None:
    [load] = [each for each in LOADS if each.name == "agents"]
    load = load if run_.on_gpus else load.small()
    model = write_shape(run_.args.model_shape, run_.directory, tokenizer=True)
    for level in run_.args.agents or load.levels[:1]:
        measure_level(run_, load, level, model)


BENCH = Bench(
    "turns",
    measure,
    __doc__,
    options=(
        Option(
            "--agents",
            "at a time (default: 16 on GPUs, 2 on a CPU)",
            type=lambda text: [float(part) for part in text.split(",")],
            metavar="N,…",
        ),
        Option("--serve", "more flags of `baton serve`, as '--prefill 0 --decode 1'", "", metavar="FLAGS"),
        Option("--model-shape", "{model}", DENSE, choices=SHAPES, metavar="NAME"),
        Option("--seed", "of lengths and texts", 0),
        LOGS,
    ),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
