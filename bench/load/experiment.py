"""One run, from options to numbers: prepares it against the server, and reduces its records."""

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.bench.load.measurement import self_check
from baton.bench.load.measurement.summary import Summary, summarize
from baton.bench.load.options import DEFAULT_CONCURRENCY, DEFAULT_DURATION, DEFAULT_SEED, Options
from baton.bench.load.target import endpoint
from baton.bench.load.target.request import Dialect, Target, new_http_session
from baton.bench.load.target.tokenization import Tokenization
from baton.bench.load.traffic.client import ClientConfig
from baton.bench.load.traffic.dataset import read_dataset
from baton.bench.load.traffic.fleet import Harvest
from baton.bench.load.traffic.trace import read_trace, spread, trace_sessions, until
from baton.bench.load.traffic.workload import Listed, Synthetic, Workload
from baton.bench.report import Report, Row
from baton.system.words import counted

_PROBE_TIMEOUT = 120.0
_CHECKED_SESSIONS = 500


@dataclass(frozen=True, slots=True)
class Setup:
    """A run that is ready to start. `client`: what one client would do. `notes` go into the report."""

    options: Options
    client: ClientConfig
    notes: tuple[str, ...]

    @property
    def load(self) -> str:
        """The load in words."""
        client = self.client
        limit = client.concurrency
        if client.workload.count is not None:
            text = f"trace at {client.time_scale:g}× its speed"
        elif self.options.context_len is not None:
            return f"{counted(limit, 'agent')} at a time"
        elif client.arrivals is None:
            return f"closed loop, {counted(limit, 'user')}"
        else:
            text = f"open loop, {client.arrivals}"
        return text + (f", at most {limit} in flight" if limit else "")

    @property
    def requests(self) -> int | None:
        """How many requests there will be; None if only the duration limits them."""
        workload, count = self.client.workload, self.client.sessions
        if count is None or workload.count is not None or not workload.keeps_sessions:
            return count
        return sum(len(workload.session(index).turns) for index in range(count))

    def clients(self) -> list[ClientConfig]:
        """The parts of the client processes."""
        processes = self.options.process_count
        count = min(processes, self.client.concurrency or processes)
        return [msgspec.structs.replace(self.client, index=index, clients=count) for index in range(count)]

    def parameters(self) -> dict[str, Any]:
        """Everything that repeating the run needs, without secrets."""
        options, client = self.options, self.client
        values: dict[str, Any] = {
            "url": ",".join(client.target.urls),
            "model": client.target.model,
            "api": client.target.api,
            "load": self.load,
            "duration_s": client.duration,
            "requests": options.requests,
            "workload": _described(options),
            "prompts": client.target.form,
            "session_as": client.target.session_as,
            "input_exactness": client.tokenization.statement,
            "dialect": msgspec.to_builtins(client.target.dialect),
            "extra_body": client.target.extra_body or None,
            "slo": str(options.objectives) or None,
            "attainment": options.attainment if options.slo else None,
            "warm_up": "detected" if options.warmup is None else options.warmup,
            "seed": client.seed,
            "texts": client.texts,
            "timeout_s": options.timeout,
            "drain_s": options.drain,
        }
        return {key: value for key, value in values.items() if value is not None}


async def prepare(options: Options) -> Setup:
    """Raises EndpointError and ValueError."""
    async with new_http_session(_PROBE_TIMEOUT) as http:
        model = await endpoint.find_model(http, options.bases[0], options.headers, options.model)
        target = Target(
            urls=options.bases,
            api=options.api,
            model=model.id,
            dialect=Dialect(),
            headers=options.headers,
            extra_body=options.extra_fields,
            session_as=options.session_as,
        )
        target, notes = await endpoint.find_dialect(http, target)
        tokenization = await endpoint.find_tokenization(http, target)
        # Prompts of `run` are text, since it measures the server's tokenizer, too.
        form = options.prompts or (None if _measures_caches(options) else "text")
        turns = options.trace is None and options.turns != "1"
        target, tokenization, more = await endpoint.find_form(http, target, tokenization, form, turns=turns)
        notes += more
    workload = await workload_of(options, tokenization)
    _check_lengths(options, workload, model.max_model_len)
    return Setup(options, client_of(options, target, workload, tokenization), tuple(notes))


def _measures_caches(options: Options) -> bool:
    """Whether what is cached decides the result, as for agents and traces."""
    return options.trace is not None or options.context_len is not None


def seed_of(options: Options) -> int:
    """Of lengths and times."""
    return DEFAULT_SEED if options.seed is None else options.seed


def client_of(
    options: Options, target: Target, workload: Workload, tokenization: Tokenization
) -> ClientConfig:
    """What one client does for the whole run. A run without any bound gets the default duration; a trace ends
    by itself."""
    most = len(workload.sessions) if isinstance(workload, Listed) else None
    bounds = [n for n in (options.requests, most) if n is not None]
    closed = options.rate is None and workload.count is None
    return ClientConfig(
        index=0,
        clients=1,
        target=target,
        workload=workload,
        tokenization=tokenization,
        seed=seed_of(options),
        texts=int.from_bytes(os.urandom(4)) if options.seed is None else options.seed,
        run_id=os.urandom(4).hex(),
        arrivals=options.schedule,
        concurrency=options.concurrency or (DEFAULT_CONCURRENCY if closed else 0),
        duration=options.duration if options.duration is not None or bounds else DEFAULT_DURATION,
        sessions=min(bounds, default=None),
        time_scale=options.speed,
        timeout=options.timeout,
        drain=options.drain,
    )


def report_of(setup: Setup, harvest: Harvest, started: str) -> Report:
    """The records of the clients as rows and detail, which has the time.monotonic() from which the records
    count. `started`: the time of day."""
    options = setup.options
    summary = summarize(
        harvest.records, options.objectives, warm_up=options.warmup, attainment=options.attainment
    )
    rows = summary.rows

    def measured(metric: str) -> dict[int, float]:
        """In seconds. With few samples the largest one stands for p99."""
        quantiles = {q: rows.get(f"{metric}.p{q}") or rows.get(f"{metric}.max") for q in self_check.CHECKED}
        return {q: row.value / 1e3 for q, row in quantiles.items() if row is not None}

    lags = [r.lag for r in harvest.records]
    client, reasons = self_check.check(harvest.loads, lags, measured("ttft"), measured("itl"), harvest.died)
    detail = summary.detail | {
        "valid": not reasons,
        "incomplete": harvest.interrupted,
        "invalid_reasons": reasons,
        "notes": [*setup.notes, *_notes(setup, summary)],
        "started_at": harvest.started,
        "elapsed_s": harvest.ended - harvest.started,
        "client": client | {"processes": len(harvest.loads)},
    }
    every = [
        *rows.values(),
        Row("client.lag.p99", client["lag_p99"] * 1e3, "ms"),
        Row("client.stall.p99", client["stall_p99"] * 1e3, "ms"),
        Row("client.cpu", client["cpu"], "share"),
    ]
    return Report("load", setup.parameters(), started=started, rows=every, detail=detail)


def _notes(setup: Setup, summary: Summary) -> Iterator[str]:
    """Sentences that a reader needs to judge the numbers."""
    values, detail = {name: row.value for name, row in summary.rows.items()}, summary.detail
    ok = values["requests.ok"]
    if off := values.get("input.off"):
        yield (
            f"{off} of {ok} prompts have other lengths than asked for, as the server counts (input lengths: "
            f"{setup.client.tokenization.statement})"
        )
    if ok and "ttft.p99" not in values:
        yield f"{counted(int(ok), 'answer')}: too few for p99 of their latencies, which needs 100"
    if short := values.get("output.short"):
        yield f"shorter than asked for: {short} of {counted(int(ok), 'answer')}"
    if (tokens := values.get("output.tokens_per_chunk", 0)) > 1.02:
        yield (
            f"a chunk has {tokens:.2f} tokens: itl is the time between chunks, itl.normalized divides it "
            "by their tokens"
        )
    if turns := detail["skipped_turns"]:
        yield f"{counted(turns, 'later turn')} not sent, since a turn before failed"
    if interrupted := detail["interrupted"]:
        yield f"{counted(interrupted, 'request')} interrupted, which the numbers leave out"
    options = setup.options
    repeats = options.prefix_len or _measures_caches(options) or options.turns != "1"
    share, overhead = values.get("input.cached"), setup.client.tokenization.overhead
    # What the server adds, as by its chat template, begins each prompt.
    if share and not repeats and share * values["input.mean"] > overhead:
        yield (
            f"the server took {share:.0%} of the prompt tokens from its cache, though no two prompts of this "
            "run begin alike: leave out --seed, or give a new one"
        )


async def workload_of(options: Options, tokenization: Tokenization) -> Workload:
    min_tokens = tokenization.overhead + 1
    if options.dataset is not None:
        length = None
        if options.output_len is not None:
            if (asked := options.output_distribution).kind != "fixed":
                raise ValueError(f"--output-len {asked}: with --dataset give a number.")
            length = round(asked.least)
        first = options.requests
        read = await asyncio.to_thread(read_dataset, options.dataset, first=first, output_len=length)
        return Listed(read, timed=False)
    if options.trace is not None:
        lines = await asyncio.to_thread(read_trace, options.trace)
        arriving = lines if options.clumps else spread(lines)
        if options.first is not None:
            arriving = arriving[: len(until(lines, options.first))]
        sessions = trace_sessions(
            arriving,
            seed=seed_of(options),
            block=options.block_size,
            length_scale=options.length_scale,
            least_input=min_tokens,
            session_blocks=options.session_blocks,
        )
        return Listed(sessions)
    opening = 0 if options.context_len is None else options.prefix_len + options.context_len
    needed, asked = max(1, min_tokens + options.prefix_len - opening), options.input_distribution
    if asked.kind == "fixed" and asked.least < needed:
        raise ValueError(
            f"--input-len {asked}: the server adds {tokenization.overhead} tokens to every prompt; give at "
            f"least {needed}."
        )
    return Synthetic(
        seed=seed_of(options),
        input_len=asked,
        output_len=options.output_distribution,
        turns=options.turn_distribution,
        think_time=options.think_distribution,
        prefix_groups=options.prefixes,
        prefix_len=options.prefix_len,
        opening_len=opening,
        least_input=needed,
    )


def _check_lengths(options: Options, workload: Workload, max_model_len: int | None) -> None:
    """Raises ValueError before the run if the server would refuse some requests as too long."""
    if max_model_len is None:
        return
    most = len(workload.sessions) if isinstance(workload, Listed) else _CHECKED_SESSIONS
    count = min(most, options.requests or sys.maxsize)
    # The last turn has the history before it.
    lengths = [
        sum(turn.input_tokens + turn.output_tokens for turn in workload.session(i).turns)
        for i in range(count)
    ]
    over = sum(length > max_model_len for length in lengths)
    if over:
        remedy = "--advanced.length-scale" if options.trace else "--input-len, --output-len or --turns"
        remedy = remedy if options.context_len is None else f"--prefix-len, --context-len, {remedy}"
        raise ValueError(
            f"{over} of {count} sessions need more than the model's {max_model_len} tokens, up to "
            f"{max(lengths)}. Give a smaller {remedy}, or serve with a larger --max-model-len."
        )


def _described(options: Options) -> dict[str, Any]:
    if options.dataset is not None:
        length = {} if options.output_len is None else {"output_len": options.output_len}
        return {"dataset": options.dataset.name, **length}
    if options.trace is not None:
        fields = {"trace": options.trace.name, "block_size": options.block_size}
        fields |= {"session_blocks": options.session_blocks, "clumps": options.clumps or None}
        fields |= {"first_s": options.first}
        fields |= {} if options.length_scale == 1 else {"length_scale": options.length_scale}
        return {key: value for key, value in fields.items() if value is not None}
    fields: dict[str, Any] = {
        "input_len": str(options.input_distribution),
        "output_len": str(options.output_distribution),
    }
    if options.context_len is not None:
        fields |= {"prefix_len": options.prefix_len, "context_len": options.context_len}
    elif options.prefix_len:
        fields |= {"prefix_groups": options.prefix_groups, "prefix_len": options.prefix_len}
    if options.turns != "1":
        fields |= {"turns": options.turns, "think_time": options.think_time}
    return fields
