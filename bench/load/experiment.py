"""One run, from options to numbers: prepare it against the server, run the clients, reduce the records."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from baton.bench.load.measurement import self_check, server_stages
from baton.bench.load.measurement.self_check import SelfCheck
from baton.bench.load.measurement.server_stages import ServerView, Snapshot
from baton.bench.load.measurement.summary import Summary, summarize
from baton.bench.load.options import DEFAULT_CONCURRENCY, DEFAULT_DURATION, Options
from baton.bench.load.target import endpoint
from baton.bench.load.target.exchange import new_http_session
from baton.bench.load.target.record import Record
from baton.bench.load.target.request import Dialect, Target
from baton.bench.load.target.tokenization import Tokenization
from baton.bench.load.traffic import datasets
from baton.bench.load.traffic.client import ClientConfig
from baton.bench.load.traffic.fleet import Fleet, Harvest
from baton.bench.load.traffic.workload import Listed, Session, Synthetic, Workload

_PROBE_TIMEOUT = 120.0
_LISTED_SESSIONS = 2000  # of a data set, if no number of requests is given
_CHECKED_SESSIONS = 500


@dataclass(frozen=True, slots=True)
class Plan:
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
            said = f"trace at {client.time_scale:g}× its speed"
        elif client.arrivals is None:
            return f"closed loop, {limit} user{'s' if limit > 1 else ''}"
        else:
            said = f"open loop, {client.arrivals}"
        return said + (f", at most {limit} in flight" if limit else "")

    def clients(self) -> list[ClientConfig]:
        """The parts of the client processes."""
        processes = self.options.process_count
        count = min(processes, self.client.concurrency or processes)
        return [msgspec.structs.replace(self.client, index=index, clients=count) for index in range(count)]

    def parameters(self) -> dict[str, Any]:
        """Everything that repeating the run needs, without secrets."""
        options, client = self.options, self.client
        pace, slo = options.pace, options.slo
        found: dict[str, Any] = {
            "url": ",".join(client.target.urls),
            "model": client.target.model,
            "api": client.target.api,
            "load": self.load,
            "duration_s": client.duration,
            "requests": pace.requests,
            "workload": _described(options),
            "input_exactness": client.tokenization.statement,
            "dialect": msgspec.to_builtins(client.target.dialect),
            "extra_body": client.target.extra_body or None,
            "slo": str(slo.objectives) or None,
            "attainment": slo.attainment if slo.slo else None,
            "warm_up": "detected" if pace.warmup is None else pace.warmup,
            "seed": options.seed,
            "timeout_s": pace.timeout,
            "drain_s": pace.drain,
        }
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run.

    Attributes:
        incomplete: the run was stopped before its end.
        refused: the text of the last refusal, if refusals stopped the run.
    """

    plan: Plan
    records: Sequence[Record]
    summary: Summary
    self_check: SelfCheck
    server: ServerView
    elapsed: float
    processes: int
    incomplete: bool
    refused: str

    @property
    def valid(self) -> bool:
        return self.self_check.valid


async def prepare(options: Options) -> Plan:
    """Raises EndpointError and ValueError."""
    chosen = options.target
    async with new_http_session(_PROBE_TIMEOUT) as http:
        model = await endpoint.find_model(http, chosen.bases[0], chosen.headers, chosen.model)
        target = Target(
            urls=chosen.bases,
            api=chosen.api,
            model=model.id,
            dialect=Dialect(),
            headers=chosen.headers,
            extra_body=chosen.extra_fields,
        )
        target, notes = await endpoint.find_dialect(http, target)
        one_turn = options.workload.turn_distribution.parameters == (1.0,)
        tokenization = await endpoint.find_tokenization(http, target, ids_allowed=one_turn)
        workload, said = await _workload(http, target, options, tokenization)
        notes += said
    _check_lengths(options, workload, model.max_model_len)
    return Plan(options, client_of(options, target, workload, tokenization), tuple(notes))


def client_of(
    options: Options, target: Target, workload: Workload, tokenization: Tokenization
) -> ClientConfig:
    """What one client does for the whole run. A run without any bound gets the default duration; a trace ends
    by itself."""
    pace, shape = options.pace, options.shape
    bounds = [n for n in (pace.requests, workload.count) if n is not None]
    closed = shape.rate is None and workload.count is None
    return ClientConfig(
        index=0,
        clients=1,
        target=target,
        workload=workload,
        tokenization=tokenization,
        seed=options.seed,
        run_id=os.urandom(4).hex(),
        arrivals=options.schedule,
        concurrency=shape.concurrency or (DEFAULT_CONCURRENCY if closed else 0),
        duration=pace.duration if pace.duration is not None or bounds else DEFAULT_DURATION,
        sessions=min(bounds, default=None),
        time_scale=options.replay.speed,
        timeout=pace.timeout,
        drain=pace.drain,
    )


async def run(plan: Plan, on_record: Callable[[Record], None], on_fleet: Callable[[Fleet], None]) -> Outcome:
    """`on_fleet` gets the fleet before it starts, and may watch and stop it."""
    options = plan.options
    async with new_http_session(_PROBE_TIMEOUT) as http:
        before = await _scrape(http, plan)
        fleet = Fleet(plan.clients())
        on_fleet(fleet)
        harvest = await fleet.run(on_record)
        after = await _scrape(http, plan)
    return _reduce(plan, options, harvest, server_stages.between(before, after))


def _reduce(plan: Plan, options: Options, harvest: Harvest, server: ServerView) -> Outcome:
    summary = summarize(
        harvest.records,
        options.slo.objectives,
        warm_up=options.pace.warmup,
        ramp=options.shape.arrivals == "ramp",
        attainment=options.slo.attainment,
    )
    checked = self_check.check(
        harvest.loads,
        [r.lag for r in harvest.records],
        _seconds(summary, "ttft"),
        _seconds(summary, "ttit"),
        harvest.died,
    )
    return Outcome(
        plan=plan,
        records=harvest.records,
        summary=summary,
        self_check=checked,
        server=server,
        elapsed=harvest.ended - harvest.started,
        processes=len(harvest.loads),
        incomplete=harvest.interrupted,
        refused=harvest.refused,
    )


def _seconds(summary: Summary, metric: str) -> float | None:
    return summary.latencies[metric]["p50"].value / 1e3 if metric in summary.latencies else None


async def _scrape(http: aiohttp.ClientSession, plan: Plan) -> Snapshot:
    target = plan.client.target
    urls = plan.options.target.metrics_url or [
        page for url in target.urls for page in await server_stages.pages(http, url, target.headers)
    ]
    return await server_stages.scrape(http, urls, target.headers)


async def _workload(
    http: aiohttp.ClientSession, target: Target, options: Options, tokenization: Tokenization
) -> tuple[Workload, list[str]]:
    chosen = options.workload
    least = tokenization.overhead + 1
    if options.trace is not None:
        lines = await asyncio.to_thread(datasets.read_trace, options.trace)
        sessions = datasets.trace_sessions(
            lines,
            seed=options.seed,
            block=options.replay.block_size,
            length_scale=options.replay.length_scale,
            least_input=least,
        )
        return Listed(sessions, timed=True), []
    if chosen.dataset is not None:
        turns = round(chosen.turn_distribution.parameters[-1])
        conversations = await asyncio.to_thread(
            datasets.read_conversations,
            datasets.resolve(chosen.dataset), options.pace.requests or _LISTED_SESSIONS, turns, options.seed,
        )  # fmt: skip
        replies = [e.reply for conversation in conversations for e in conversation]
        lengths, how = await endpoint.count_texts(http, target, replies)
        listed = Listed(datasets.conversation_sessions(conversations, lengths))
        return listed, [f"output lengths are those of the data set's replies, counted {how}"]
    needed = least + chosen.prefix_len
    if chosen.input_distribution.kind == "fixed" and chosen.input_distribution.least < needed:
        raise ValueError(
            f"--input-len {chosen.input_distribution}: the server adds {tokenization.overhead} tokens "
            f"to every prompt; give at least {needed}."
        )
    return Synthetic(
        seed=options.seed,
        input_len=chosen.input_distribution,
        output_len=chosen.output_distribution,
        turns=chosen.turn_distribution,
        think_time=chosen.think_distribution,
        prefix_groups=chosen.prefix_groups,
        prefix_len=chosen.prefix_len,
        least_input=needed,
    ), []


def _check_lengths(options: Options, workload: Workload, max_model_len: int | None) -> None:
    """Raises ValueError before the run if the server would refuse some requests as too long."""
    if max_model_len is None:
        return
    count = min(workload.count or _CHECKED_SESSIONS, options.pace.requests or sys.maxsize)
    longest = [_longest(workload.session(i)) for i in range(count)]
    over = sum(length > max_model_len for length in longest)
    if over:
        remedy = "--length-scale" if options.trace else "--input-len, --output-len or --turns"
        raise ValueError(
            f"{over} of {count} sessions need more than the model's {max_model_len} tokens, up to "
            f"{max(longest)}. Give a smaller {remedy}, or serve with a larger --max-model-len."
        )


def _longest(session: Session) -> int:
    """Tokens of the last turn with its history. The length of a text is not known and counts as 0."""
    return sum(turn.input_tokens + turn.output_tokens for turn in session.turns)


def _described(options: Options) -> dict[str, Any]:
    workload, replay = options.workload, options.replay
    if options.trace is not None:
        scaled = {} if replay.length_scale == 1 else {"length_scale": replay.length_scale}
        return {"trace": options.trace.name, "block_size": replay.block_size} | scaled
    if workload.dataset is not None:
        return {"dataset": workload.dataset.name, "turns": workload.turns}
    found: dict[str, Any] = {
        "input_len": str(workload.input_distribution),
        "output_len": str(workload.output_distribution),
    }
    if workload.prefix_groups:
        found |= {"prefix_groups": workload.prefix_groups, "prefix_len": workload.prefix_len}
    if workload.turns != "1":
        found |= {"turns": workload.turns, "think_time": workload.think_time}
    return found
