"""What a user asks for: every flag once, checked as far as possible without the server.

Where `vllm bench serve` has the same flag, its name is accepted, too (`--request-rate`, `--num-prompts`, …).
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from baton.bench.load.measurement.slo import SYNTAX as SLO_SYNTAX
from baton.bench.load.measurement.slo import Slo
from baton.bench.load.target.request import Api, Form, SessionAs
from baton.bench.load.traffic.trace import MOONCAKE_BLOCK
from baton.bench.load.traffic.workload import AGENTS, SYNTAX, Arrivals, Distribution
from baton.cluster.options.parameters import OLD_FILE, advanced, argument, flag, opt
from baton.system import usable_cpus

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_CONCURRENCY = 4
DEFAULT_AGENTS = 16
DEFAULT_DURATION = 30.0
DEFAULT_SEED = 0
INPUT_TOKENS, OUTPUT_TOKENS = "256", "64"  # of a request
_MOST_PROCESSES = 8


# The groups of flags by their section in the help. `Options` has the fields of all of them.


@dataclass(frozen=True, kw_only=True)
class Target:
    panel: ClassVar = "Target"
    url: str = opt(
        DEFAULT_URL,
        "Any OpenAI-compatible server. Of several, sessions take turns.",
        "URL,…",
        also="--base-url",
    )
    model: str | None = opt(None, "Model to ask for.", "NAME", shown="the server's first")
    api: Api = opt("completions", "completions: /v1/completions; chat: /v1/chat/completions.")
    api_key: str | None = opt(
        None, "Prefer BATON_API_KEY, which others cannot read.", "KEY", envvar="BATON_API_KEY"
    )
    prompts: Form | None = advanced(
        None,
        "ids: of token ids, which makes lengths, histories and blocks of a trace exact; text.",
        shown="text; of agents and traces ids, if the server takes them",
    )
    session_as: SessionAs = advanced(
        "header", "How a request names its session: header x-session-id, field user, or none."
    )
    extra_body: str = advanced("", 'More fields, like {"top_p": 0.9}.', "JSON")

    @property
    def bases(self) -> tuple[str, ...]:
        """Without a slash or /v1 at the end, which many configurations of clients have."""
        return tuple(url.rstrip("/").removesuffix("/v1").rstrip("/") for url in self.url.split(","))

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def extra_fields(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.extra_body or "{}")
        except json.JSONDecodeError as e:
            raise ValueError(f"--advanced.extra-body {self.extra_body!r} is not JSON: {e}.") from e
        if not isinstance(fields, dict):
            raise ValueError(
                f'--advanced.extra-body {self.extra_body!r} must be an object, like {{"top_p": 0.9}}.'
            )
        return fields


@dataclass(frozen=True, kw_only=True)
class Workload:
    panel: ClassVar = "Workload"
    dataset: Path | None = opt(
        None,
        "Send the prompts of this file, each once: ShareGPT's JSON, JSONL with messages, or OpenAI's batch "
        "form.",
        "FILE",
        shown="random words",
        also="--dataset-path",
        **OLD_FILE,
    )
    input_len: str | None = opt(
        None, f"Prompt tokens, exact: {SYNTAX}", "TOKENS", shown=INPUT_TOKENS, also="--random-input-len"
    )
    output_len: str | None = opt(
        None, "Output tokens: likewise.", "TOKENS", shown=OUTPUT_TOKENS, also="--random-output-len"
    )
    prefix_len: int = opt(0, "Prompt tokens that a group has in common.", "TOKENS")
    prefix_groups: int = advanced(1, "With --prefix-len: groups of prompts that share their prefix.", "N")
    turns: str = opt("1", "Requests of a session, each with all before it: a number as above.", "N")
    think_time: str = opt("0", "From an answer to the next turn: likewise.", "SECONDS")

    @property
    def input_distribution(self) -> Distribution:
        return Distribution.parse(self.input_len or INPUT_TOKENS, "--input-len")

    @property
    def output_distribution(self) -> Distribution:
        return Distribution.parse(self.output_len or OUTPUT_TOKENS, "--output-len")

    @property
    def turn_distribution(self) -> Distribution:
        return Distribution.parse(self.turns, "--turns")

    @property
    def think_distribution(self) -> Distribution:
        return Distribution.parse(self.think_time, "--think-time")


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Sessions of many turns. `Options` has other defaults for what `Workload` has, too."""

    panel: ClassVar = "Workload"
    prefix_len: int = opt(
        AGENTS["prefix_len"], "Tokens that all prompts begin with, like rules and tools.", "TOKENS"
    )
    context_len: int | None = opt(
        AGENTS["context_len"], "Tokens that follow in a session's prompts, like its files.", "TOKENS"
    )
    turns: str = opt(AGENTS["turns"], "Requests of a session, each with all before it.", "N")
    input_len: str | None = opt(
        AGENTS["input_len"],
        "New tokens of a turn, like the output of a tool: a distribution, as of `run`.",
        "TOKENS",
    )
    output_len: str | None = opt(AGENTS["output_len"], "Output tokens: likewise.", "TOKENS")
    think_time: str = opt(
        AGENTS["think_time"], "From an answer to the next turn, while tools run: likewise.", "SECONDS"
    )


@dataclass(frozen=True, kw_only=True)
class Trace:
    panel: ClassVar = "Workload"
    trace: Path | None = argument("JSONL in Mooncake's format, or a small sample.", "TRACE", default=None)
    speed: float = opt(1.0, "2 replays the trace in half its time.", "FACTOR")
    first: float | None = advanced(None, "Only what the trace has before this time.", "SECONDS", shown="all")
    clumps: bool = advanced(
        False,
        "Send requests of one time stamp at once. Otherwise they arrive evenly until the next time stamp: "
        "some recorders write every few seconds.",
    )
    session_blocks: int = advanced(
        2,
        "Requests whose first N hash ids are equal are one session, and go to one server of several; 0: no "
        "sessions.",
        "N",
    )
    length_scale: float = advanced(
        1.0, "Scales blocks, inputs and outputs alike, for models with a short context.", "FACTOR"
    )
    block_size: int = advanced(MOONCAKE_BLOCK, "Tokens of one hash id of the trace.", "TOKENS")


@dataclass(frozen=True, kw_only=True)
class Rate:
    """An open loop. Without `rate` it is a closed loop."""

    panel: ClassVar = "Load"
    rate: float | None = opt(
        None,
        "Open loop: sessions started per second, whatever the server does.",
        "PER_SECOND",
        shown="closed loop",
        also="--request-rate",
    )
    burstiness: float = advanced(
        1.0,
        "How an open loop spreads its starts: 1 is Poisson, below is burstier, above smoother, inf even.",
        "SHAPE",
    )


@dataclass(frozen=True, kw_only=True)
class Load:
    panel: ClassVar = "Load"
    concurrency: int | None = opt(
        None,
        "Closed loop: users. Else the most in flight; waiting for a place counts as latency.",
        "N",
        shown=f"{DEFAULT_CONCURRENCY} users, {DEFAULT_AGENTS} agents, or no limit",
        also="--max-concurrency",
    )
    duration: float | None = opt(
        None, "How long to send new requests.", "SECONDS", shown=f"{DEFAULT_DURATION:g}, unless --requests"
    )
    requests: int | None = opt(
        None,
        "Sessions to send at most; a session has one request or --turns.",
        "N",
        shown="no limit, or twice as many as agents",
        also=("--num-prompts", "--sessions"),
    )
    warmup: float | None = opt(
        None,
        "Excluded from all results. By default the time until TTFT settles (MSER-5); 0 excludes nothing.",
        "SECONDS",
        shown="detected; of agents 0",
    )
    drain: float = advanced(
        60.0, "Wait so long for answers after the last request; later answers fail.", "SECONDS"
    )
    timeout: float = advanced(600.0, "Of one request; a slower one has failed.", "SECONDS")
    processes: int | None = advanced(
        None, "Client processes that share the load.", "N", shown="half the CPUs"
    )
    seed: int | None = opt(
        None,
        "Decides lengths, times, and the texts of prompts. By default texts are new in each run, so that no "
        "prefix cache has them.",
        "N",
        shown=f"{DEFAULT_SEED}, with new texts",
    )


@dataclass(frozen=True, kw_only=True)
class Output:
    panel: ClassVar = "Objectives and output"
    slo: str = opt("", f"{SLO_SYNTAX}.", "LIMITS", also="--goodput")
    attainment: float = advanced(
        0.99, "Share of the requests that must meet the limits for the run to meet them.", "SHARE"
    )

    json: Path | None = opt(None, "Write the results as JSON.", "FILE")
    html: Path | None = opt(
        None, "Write the results as a page with plots: one file, which needs no others.", "FILE"
    )
    jsonl: Path | None = advanced(None, "Write every request as a line of JSON.", "FILE")
    quiet: bool = opt(False, "Nothing on stderr but errors.")

    @property
    def objectives(self) -> Slo:
        return Slo.parse(self.slo)


@dataclass(frozen=True, kw_only=True)
class Options(Target, Workload, Agents, Trace, Rate, Load, Output):
    """One run. A `trace` decides what is sent and when; then `concurrency` only limits what is in flight.

    `context_len` is None but for agents, the tokens of which come before their `input_len`.
    """

    context_len: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError that names the flag, its value and the remedy."""
        for url in self.url.split(","):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"--url {url!r} is no address. Write it like {DEFAULT_URL}.")
        self._check_numbers()
        self._check_workload()
        if not self.burstiness > 0:
            raise ValueError(f"--advanced.burstiness {self.burstiness:g} must be a positive number, or inf.")
        if self.burstiness != 1.0 and self.rate is None:
            raise ValueError(
                f"--advanced.burstiness {self.burstiness:g} shapes an open loop: give its --rate."
            )
        # The results would be lost after the run.
        files = {"--json": self.json, "--advanced.jsonl": self.jsonl, "--html": self.html}
        for option, path in files.items():
            if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
                raise ValueError(
                    f"{option} {path}: no file can be written there. Give a file in a directory that exists."
                )
        self.extra_fields, self.objectives  # noqa: B018 - read for their errors

    def _check_numbers(self) -> None:
        for name in (
            "speed", "length_scale", "block_size", "rate", "concurrency", "duration", "requests", "timeout",
            "processes", "first", "prefix_groups",
        ):  # fmt: skip
            value, option = getattr(self, name), self._flag(name)
            if value is not None and not 0 < value < math.inf:
                hint = " For as fast as possible, give --concurrency instead." if name == "rate" else ""
                raise ValueError(f"{option} {value:g} must be a positive number.{hint}")
        for name in ("warmup", "drain", "seed", "prefix_len", "context_len", "session_blocks"):
            value, option = getattr(self, name), self._flag(name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{option} {value:g} must not be negative.")
        if self.warmup is not None and self.duration is not None and self.warmup >= self.duration:
            raise ValueError(
                f"--warmup {self.warmup:g} leaves nothing of --duration {self.duration:g}. Make it shorter."
            )
        if not 0 < self.attainment <= 1:
            raise ValueError(
                f"--advanced.attainment {self.attainment:g} must be a share: more than 0, at most 1."
            )

    def _flag(self, name: str) -> str:
        return flag(name, advanced=self.__dataclass_fields__[name].metadata.get("advanced", False))

    def _check_workload(self) -> None:
        flags = {"--input-len": self.input_len, "--prefix-len": self.prefix_len}
        flags |= {"--turns": self.turns != "1", "--advanced.prompts ids": self.prompts == "ids"}
        if self.dataset is not None and (other := [name for name, value in flags.items() if value]):
            raise ValueError(f"--dataset {self.dataset} has its own prompts: leave out {', '.join(other)}.")
        is_in_input = self.context_len is None  # the prefix
        if self.prefix_groups > 1 and not self.prefix_len:
            raise ValueError(
                f"--advanced.prefix-groups {self.prefix_groups}: their prefixes have no tokens; give "
                "--prefix-len."
            )
        min_tokens = self.input_distribution.least
        if self.prefix_len and is_in_input and min_tokens <= self.prefix_len:
            raise ValueError(
                f"--prefix-len {self.prefix_len}: the prefix is part of the prompt, but --input-len "
                f"{self.input_distribution} can be as short as {min_tokens:g}."
            )
        if self.turn_distribution.least < 1 and self.turn_distribution.kind in ("fixed", "uniform"):
            raise ValueError(f"--turns {self.turns}: a session has at least one turn. Try uniform:1,8.")
        self.output_distribution, self.think_distribution  # noqa: B018 - read for their errors

    @property
    def schedule(self) -> Arrivals | None:
        """When sessions of an open loop start."""
        burstiness = None if self.burstiness == math.inf else self.burstiness
        return None if self.rate is None else Arrivals(self.rate, burstiness)

    @property
    def prefixes(self) -> int:
        """How many different prefixes the prompts begin with."""
        return self.prefix_groups if self.prefix_len else 0

    @property
    def process_count(self) -> int:
        """Leaves half of the CPUs to the rest of the machine."""
        return self.processes or max(1, min(_MOST_PROCESSES, usable_cpus() // 2))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The flags of a run of which a sweep takes several values."""

    panel: ClassVar = "Sweep"
    rate: str = opt("", "Open loops with these rates, one after the other.", "R,R,…", also="--request-rate")
    concurrency: str = opt(
        "",
        "Closed loops with these numbers of users. With rates one number: the most in flight.",
        "N,N,…",
        also="--max-concurrency",
    )
    find_rate: float | None = opt(
        None, "Search the highest rate within --slo, beginning with this one.", "PER_SECOND"
    )


@dataclass(frozen=True)
class Runs:
    """The runs of a sweep. `searches`: the first one begins a search of the highest rate."""

    points: tuple[Options, ...]
    searches: bool

    @classmethod
    def of(cls, *, rate: str, concurrency: str, find_rate: float | None, **shared: Any) -> Self:
        """From the flags of `Sweep` and those that all runs share. Raises ValueError like `Options`."""
        users = [int(n) for n in _numbers("--concurrency", concurrency, whole=True)]
        rates = _numbers("--rate", rate) if find_rate is None else [find_rate]
        if (rate and find_rate is not None) or not (rates or users):
            raise ValueError("a sweep needs one of --rate, --find-rate, and --concurrency alone.")
        if find_rate is not None and not 0 < find_rate < math.inf:
            raise ValueError(f"--find-rate {find_rate:g} must be a positive number.")
        if not rates:
            return cls(tuple(Options(concurrency=n, **shared) for n in users), False)
        if len(users) > 1:
            raise ValueError(f"--concurrency {concurrency}: with rates give one number, the most in flight.")
        most = users[0] if users else None
        points = tuple(Options(rate=each, concurrency=most, **shared) for each in rates)
        if find_rate is not None and not points[0].slo:
            raise ValueError("--find-rate needs an objective: give --slo, like ttft.p99=300,itl.p99=50.")
        return cls(points, find_rate is not None)


def _numbers(option: str, text: str, *, whole: bool = False) -> list[float]:
    """Those of `text`, which may be empty."""
    try:
        numbers = [float(x) for x in text.split(",")] if text else []
    except ValueError:
        numbers = [0.0]
    if not all(0 < n < math.inf and (n.is_integer() or not whole) for n in numbers):
        kind = "whole numbers above 0" if whole else "positive numbers"
        raise ValueError(f"{option} {text!r}: give {kind} separated by commas, like 1,2,4,8.")
    return numbers
