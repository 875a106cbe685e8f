"""vLLM with Baton's transfer of KV, beside one vLLM alone and vLLM with NixlConnector.

All servers of all sides run at the same time, on CPUs, one GPU or two. Of two GPUs, those that decode for
others have the second one:

    alone      one server
    proxied    two servers with BatonConnector; this bench does what a proxy for NixlConnector does
    nixl       the same with NixlConnector, over TCP (GPUs only)
    nvlink     the same with NixlConnector, over what UCX chooses
    workers    `baton prefill|decode --engine vllm` behind a router, which hands all prompts over
    overflow   the same workers behind a router that lets the decode worker compute prompts, too
    to_vllm    Baton's engine prefills and vLLM decodes, behind a router
    from_vllm  vLLM prefills and Baton's engine decodes

A small random model in float32 shows whether the tokens are those of `alone` (`different`: prompts). On a GPU
the shape of Llama 8B in bfloat16 is measured, on CPUs the small model again. Rows, of `workers` if they name
no side:

    ttft       until the first token, ÷ alone
    handover   from the first token to the second; with a proxy from the answer of P to the first token of D
    prefill    P's answer with BatonConnector ÷ that of a server without connector: the cost of the hooks
    decode.*   time between tokens ÷ alone: of a server with CUDA graphs in pieces, and with full graphs
    hidden     share of the transfer that the prefill hides
    rR.*       under R requests a second of 2,000 tokens with answers of 150: `overflow` ÷ `nvlink`;
               `second` is the time from the first token to the second

A server that does not start is told with the end of its log, and its sides are left out. The Python that runs
this must have vLLM. `--logs` keeps the logs, each with its command.
"""

import argparse
import asyncio
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from baton.bench.lab.disagg.__main__ import FIXED, Request, figure, rates, ratio
from baton.bench.lab.driver import LOGS, MIN_PAIRS, Bench, Option, Run
from baton.bench.lab.harness.processes import Server
from baton.bench.lab.harness.streams import Case, new_session, read, with_ends
from baton.bench.lab.shapes import DENSE, SHAPES, write_shape
from baton.bench.report import Report, Row
from baton.steps.quantiles import percentile
from baton.system.addresses import free_port
from baton.system.metrics_page import samples

SMALL = "small-random"
SIDES = ("nixl", "nvlink", "alone", "proxied", "workers", "overflow", "to_vllm", "from_vllm")
"""Those of GPUs first. The last two have the small model only."""
START_S = {"cpu": 400.0, "cuda": 240.0}
TOKENS, PROMPT, LONG = 8, 2000, 150
LOAD_S = 12.0
COMMON = ("--max-model-len", "2304", "--max-num-batched-tokens", "2048", "--served-model-name", "m")
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_ENGINES = {"workers": ("vllm", "vllm"), "overflow": ("vllm", "vllm"),
            "to_vllm": ("baton", "vllm"), "from_vllm": ("vllm", "baton")}  # fmt: skip
"""Of the prefill and the decode worker."""
SECRET = {"BATON_CLUSTER_SECRET": "of this bench, and of no other"}
Times = list[float]
Draw = Callable[[int], list[int]]
"""Returns a random prompt of so many tokens."""


@dataclass
class Answer:
    tokens: list[int]
    times: Times
    """Of each token, since the request. With a proxy that of P's answer comes first."""


class Deployment:
    """The servers of one model."""

    def __init__(
        self, args: argparse.Namespace, model: Path, dtype: str, sides: Sequence[str], logs: Path
    ) -> None:
        self._cuda, self._dummy = args.device == "cuda", model.name != SMALL
        self._model, self._dtype, self._logs = model, dtype, logs
        self._name = model.name
        self.sides = [side for side in sides if side in args.side]
        self._servers: dict[str, Server] = {}
        self._urls: dict[str, str] = {}
        """Of each server, for requests about its health and its metrics."""
        self._workers: dict[str, str] = {}
        """Addresses for routers, by name."""
        self._session = new_session()
        for side in self.sides:
            if side in _ENGINES:
                self._behind_router(side)
            elif side == "alone":
                self._vllm("alone")
            else:
                self._pair(side)

    # ------------------------------------------------------------ servers

    def _start(self, name: str, port: int, *line: str, **environment: str) -> None:
        full = f"{self._name}-{name}"
        command, log = (sys.executable, "-m", *line), self._logs / f"{full}.log"
        self._servers[name] = Server(full, command, log, environment)
        self._urls[name] = f"http://127.0.0.1:{port}"

    def _gpu(self, *, decodes: bool) -> dict[str, str]:
        import torch

        two = self._cuda and torch.cuda.device_count() > 1
        return {"CUDA_VISIBLE_DEVICES": "01"[decodes]} if two else {}

    def _vllm(self, name: str, connector: dict[str, Any] | None = None, **environment: str) -> None:
        port, more = free_port(), []
        if connector is not None:
            more = ["--kv-transfer-config", json.dumps(connector)]
        if name == "proxied-p" and self._cuda:
            more += ["--compilation-config", '{"cudagraph_mode": "PIECEWISE"}']
        self._start(
            name, port, "vllm.entrypoints.openai.api_server", "--port", str(port), *self._options, *more,
            *self._small_share, *self._of_vllm, **({} if self._cuda else ON_CPU), **environment,
            **self._gpu(decodes=name.endswith("-d")),
        )  # fmt: skip

    @property
    def _options(self) -> list[str]:
        dummy = ["--load-format", "dummy", "--no-enable-prefix-caching"] if self._dummy else []
        most = "64" if self._dummy else "16"
        return ["--model", str(self._model), "--dtype", self._dtype, "--max-num-seqs", most, *dummy, *COMMON]

    @property
    def _small_share(self) -> list[str]:
        return ["--gpu-memory-utilization", "0.05"] if self._cuda else []

    @property
    def _of_vllm(self) -> list[str]:
        """Those that Baton lacks."""
        if not self._cuda:
            return ["--enforce-eager"]
        return ["--kv-cache-memory-bytes", str(1 << 33 if self._dummy else 1 << 28)]

    def _pair(self, side: str) -> None:
        for i, role in enumerate(("producer", "consumer")):
            connector: dict[str, Any] = {"kv_role": f"kv_{role}", "kv_connector": "NixlConnector"}
            environment = {}
            if side == "proxied":
                connector |= {
                    "kv_connector": "BatonConnector",
                    "kv_connector_module_path": "baton.vllm_worker.connector",
                    "kv_load_failure_policy": "recompute",
                }  # fmt: skip
            else:
                environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            if side == "nixl":
                environment["UCX_TLS"] = "tcp,cuda_copy"
            self._vllm(f"{side}-{'pd'[i]}", connector, **environment)

    def _behind_router(self, side: str) -> None:
        workers: list[str] = []
        for role, engine in zip(("prefill", "decode"), _ENGINES[side], strict=True):
            name = f"{engine}-{role}"
            if name not in self._workers:  # sides share workers
                self._worker(name, role, engine)
            workers += ["--worker", self._workers[name]]
        port, more = free_port(), [] if side == "overflow" else ["--advanced.no-overflow"]
        self._start(
            f"{side}-router", port, "baton.cluster.cli", "router", "--port", str(port), *more,
            "--model", str(self._model), "--served-model-name", "m", *workers, **SECRET,
        )  # fmt: skip

    def _worker(self, name: str, role: str, engine: str) -> None:
        port, metrics = free_port(), free_port()
        self._workers[name] = f"127.0.0.1:{port}"
        line = ["--engine", engine, "--port", str(port), "--metrics-port", str(metrics), *self._options]
        if engine == "vllm":
            line += [*self._small_share, "--vllm-args", shlex.join(self._of_vllm)]
        elif self._cuda:
            line += ["--advanced.num-blocks", "4000"]
        line += ["--device", "cuda"] if self._cuda else ["--device", "cpu", "--advanced.num-threads", "1"]
        gpu = self._gpu(decodes=role == "decode")
        self._start(name, metrics, "baton.cluster.cli", role, *line, **SECRET, **gpu)

    def _names(self, side: str) -> list[str]:
        """The servers of a side."""
        if side in _ENGINES:
            prefill, decode = _ENGINES[side]
            return [f"{side}-router", f"{prefill}-prefill", f"{decode}-decode"]
        return ["alone"] if side == "alone" else [f"{side}-p", f"{side}-d"]

    async def until_ready(self, deadline: float) -> None:
        """Leaves out the sides that do not start."""
        ready = await asyncio.gather(*(self._is_up(name, deadline) for name in self._servers))
        up = {name for name, is_up in zip(self._servers, ready, strict=True) if is_up}
        self.sides = [side for side in self.sides if up.issuperset(self._names(side))]

    async def _is_up(self, name: str, deadline: float) -> bool:
        try:
            await asyncio.to_thread(self._servers[name].until_answers, f"{self._urls[name]}/health", deadline)
        except RuntimeError as error:
            print(f"== {error}", file=sys.stderr, flush=True)
            return False
        return True

    async def stop(self) -> None:
        await self._session.close()
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self._servers.values()))

    # ------------------------------------------------------------ requests

    async def ask(self, side: str, prompt: list[int], tokens: int = TOKENS) -> Answer:
        names = self._names(side)
        if len(names) != 2:
            return await self.stream(names[0], prompt, tokens)
        began = time.perf_counter()
        transfer = {"do_remote_decode": True, "do_remote_prefill": False}
        first = await self.post(names[0], prompt, {"max_tokens": 1, "kv_transfer_params": transfer})
        answered = time.perf_counter() - began
        answer = await self.stream(names[1], prompt, tokens, kv_transfer_params=first["kv_transfer_params"])
        return Answer(answer.tokens, [answered, *(answered + at for at in answer.times)])

    async def post(self, name: str, prompt: list[int], more: dict[str, Any]) -> Any:
        body = {"model": "m", "temperature": 0, "ignore_eos": True, "prompt": prompt} | more
        async with self._session.post(f"{self._urls[name]}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:500]}")
            return await response.json()

    async def stream(self, name: str, prompt: list[int], tokens: int, **more: Any) -> Answer:
        case = Case("", tokens, temperature=0.0, seed=0)
        reading = read(self._session, self._urls[name], case, prompt=prompt, model="m", **more)
        [stream] = with_ends([await reading])
        return Answer(stream.token_ids, [at - stream.started for at in stream.arrivals])

    async def means(self, name: str) -> dict[str, float]:
        """The means of the histograms of a worker."""
        async with self._session.get(f"{self._urls[name]}/metrics") as response:
            page = await response.text()
        values = {each.name: each.value for each in samples(page) if each.name.startswith("baton:")}
        sums = {name.removesuffix("_sum"): value for name, value in values.items() if name.endswith("_sum")}
        return {name: value / count for name, value in sums.items() if (count := values[f"{name}_count"])}

    # ------------------------------------------------------------ measurements

    async def different(self, prompts: Sequence[list[int]]) -> dict[str, int]:
        """Returns by side how many answers are not those of `alone`."""
        counts: dict[str, int] = {}
        right = [(await self.ask("alone", prompt)).tokens for prompt in prompts]
        for side in self.sides:
            answers = [await self._asked(side, prompt) for prompt in prompts]
            answers += await asyncio.gather(*(self._asked(side, prompt) for prompt in prompts))
            counts[side] = sum(a != b for a, b in zip(answers, right * 2, strict=True))
        return counts

    async def _asked(self, side: str, prompt: list[int]) -> list[int] | None:
        try:
            return (await self.ask(side, prompt)).tokens
        except (RuntimeError, aiohttp.ClientError) as error:
            print(f"{self._name} {side}, {len(prompt)} tokens: {error!r}", file=sys.stderr)
            return None

    async def latencies(self, report: Report, prefix: str, rounds: int, draw: Draw) -> None:
        sides = [side for side in self.sides if side not in ("overflow", "to_vllm", "from_vllm")]
        answers: dict[str, list[Answer]] = {side: [] for side in sides}
        one: Times = []
        for i in range(rounds + 2):
            for side in sides:
                answer = await self.ask(side, draw(PROMPT))
                if i >= 2:  # before that all is compiled
                    answers[side].append(answer)
            began = time.perf_counter()
            await self.post("alone", draw(PROMPT), {"max_tokens": 1})
            if i >= 2:
                one.append(time.perf_counter() - began)
        alone = [answer.times[0] for answer in answers["alone"]]
        for side in sides:
            name = prefix if side == "workers" else f"{prefix}.{side}"
            proxied = len(self._names(side)) == 2
            firsts = [answer.times[proxied] for answer in answers[side]]
            if side == "alone":
                report.add(Row(f"{name}.ttft", 1e3 * statistics.median(alone), "ms"))
                continue
            report.add_ratio(f"{name}.ttft", firsts, "ms", alone, "alone", scale=1e3)
            handovers = [answer.times[1] - answer.times[0] for answer in answers[side]]
            report.add_median(f"{name}.handover", handovers, "ms", scale=1e3)
            if proxied:
                answered = [answer.times[0] for answer in answers[side]]
                goal = 1.05 if side == "proxied" and self._cuda else None
                report.add_ratio(f"{name}.prefill", answered, "ms", one, "alone", scale=1e3, goal=goal)
        if "workers" in sides:
            for role in ("prefill", "decode"):
                report.detail[f"means of {role}"] = await self.means(f"vllm-{role}")
            hidden = report.detail["means of decode"]["baton:kv_hidden_share"]
            report.add(Row(f"{prefix}.hidden", hidden, "of 1"))

    async def load(self, report: Report, prefix: str, rate: float, draw: Draw) -> None:
        """An open loop: the same arrivals for each side, and prompts of its own."""
        at = np.random.default_rng(0).exponential(1 / rate, round(rate * LOAD_S)).cumsum()
        requests: dict[str, list[Request]] = {}
        for side in {"overflow", "nvlink"}.intersection(self.sides):
            answers = await asyncio.gather(*(self._ask_at(float(t), side, draw(PROMPT)) for t in at))
            times = [answer.times[len(self._names(side)) == 2 :] for answer in answers]
            requests[side] = [{"ttft": 1e3 * np.array(t[:1]), "gap": 1e3 * np.diff(t)} for t in times]
            label = f"{prefix}.r{rate:g}.{side}"
            seconds = [float(request["gap"][0]) for request in requests[side]]
            report.add(Row(f"{label}.second.p99", percentile(seconds, 0.99), "ms"))
            for name in FIXED:
                if (ms := figure([requests[side]], name)) is not None:
                    report.add(Row(f"{label}.{name}", ms, "ms"))
        for name in FIXED if len(requests) == 2 else ():
            if (compared := ratio([requests["overflow"]], [requests["nvlink"]], name)) is not None:
                value, low, high = compared
                row = Row(f"{prefix}.r{rate:g}.{name}", value, "ratio", ratio_to="nvlink", low=low, high=high)
                report.add(row)

    async def _ask_at(self, seconds: float, side: str, prompt: list[int]) -> Answer:
        await asyncio.sleep(seconds)
        return await self.ask(side, prompt, LONG)

    async def decodes(self, report: Report, prefix: str, rounds: int, draw: Draw) -> None:
        kinds = {"alone": "alone", "piecewise": "proxied-p", "full": "proxied-d", "worker": "workers-router"}
        up = {name for side in self.sides for name in self._names(side)}
        servers = {kind: name for kind, name in kinds.items() if name in up}
        for batch in (1, 8):
            gaps: dict[str, Times] = {kind: [] for kind in servers}
            for i in range(rounds + 1):
                for kind, name in servers.items():
                    answers = await asyncio.gather(*(self.stream(name, draw(64), 64) for _ in range(batch)))
                    if i:
                        gaps[kind].append(statistics.median(map(_gap, answers)))
            for kind in servers:
                row = f"{prefix}.decode.{kind}.b{batch}"
                report.add_ratio(row, gaps[kind], "ms", gaps["alone"], "alone", scale=1e3)


def _gap(answer: Answer) -> float:
    """Seconds between two tokens. The first of them may wait for other requests."""
    return (answer.times[-1] - answer.times[8]) / (len(answer.times) - 9)


def small_model(directory: Path) -> Path:
    """Writes a checkpoint with random weights, large enough that each token depends on all KV."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = write_shape(SMALL, directory, tokenizer=True)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(path)).save_pretrained(path)
    return path


async def measured(run: Run) -> None:
    args, rng = run.args, random.Random(0)
    rounds = MIN_PAIRS if run.short else 9

    def draw(length: int) -> list[int]:
        return [rng.randrange(10, SHAPES[SMALL]["vocab_size"]) for _ in range(length)]

    lengths = [3, 16, 17, 130, 700] if run.short else [3, *(5 + 69 * i for i in range(28)), 2049]
    small = Deployment(args, small_model(run.directory), "float32", SIDES[2:], run.logs)
    large = small
    try:
        if run.on_gpus:
            dense = write_shape(DENSE, run.directory, tokenizer=True)
            large = Deployment(args, dense, "bfloat16", SIDES[:6], run.logs)
        deadline, began = time.monotonic() + START_S[run.device], time.monotonic()
        await asyncio.gather(*(each.until_ready(deadline) for each in {small, large}))
        seconds = time.monotonic() - began
        print(f"up after {seconds:.0f} s: {small.sides} {large.sides}", file=sys.stderr, flush=True)
        prefix = f"vllm.{run.device}"
        if "alone" in small.sides:
            different = await small.different([draw(length) for length in lengths])
            run.detail["different"] = different
            run.add(Row(f"{prefix}.different", sum(different.values()), "prompts", goal=0))
        if "alone" in large.sides:
            await large.latencies(run, prefix, rounds, draw)
            await large.decodes(run, prefix, rounds, draw)
            for rate in args.rates:
                await large.load(run, prefix, rate, draw)
        if run.on_gpus and "alone" in large.sides:  # rounding may change tokens in bfloat16
            run.detail["different in bfloat16"] = await large.different(
                [draw(n) for n in (3, 130, 700, 2000)]
            )
    finally:
        for each in {small, large}:
            await each.stop()
    print(json.dumps(run.detail))


BENCH = Bench(
    "vllm",
    lambda run: asyncio.run(measured(run)),
    __doc__,
    options=(
        LOGS,
        Option("--side", "", SIDES, nargs="*", choices=SIDES),
        Option("--rates", "requests/s", (), type=rates, metavar="R,…"),
    ),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
