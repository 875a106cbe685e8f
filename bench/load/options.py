"""What a user asks for: every flag once, checked as far as that needs no server.

Names are those of `vllm bench serve` where it has the thing (`--request-rate`, `--max-concurrency`,
`--num-prompts`, `--burstiness`, …, beside our shorter ones).
"""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from bench.load.measurement.slo import SYNTAX as SLO_SYNTAX
from bench.load.measurement.slo import Slo
from bench.load.target.request import Api
from bench.load.traffic.arrivals import ArrivalKind, Arrivals
from bench.load.traffic.datasets import MOONCAKE_BLOCK
from bench.load.traffic.distribution import SYNTAX, Distribution
from bench.load.traffic.workload import DEFAULT_PRESET, PRESETS

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_CONCURRENCY = 4
DEFAULT_DURATION = 30.0
_MOST_PROCESSES = 8


def _flag(panel: str, *names: str, shown: str | bool = True, metavar: str | None = None, text: str) -> Any:
    return typer.Option(*names, help=text, show_default=shown, metavar=metavar, rich_help_panel=panel)


_T, _W, _L, _O = "Target", "Workload", "Load", "Objectives and output"


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Whom to measure."""

    url: Annotated[
        str, _flag(_T, "--url", "--base-url", metavar="URL", text="Any OpenAI-compatible server.")
    ] = DEFAULT_URL
    model: Annotated[
        str | None, _flag(_T, "--model", metavar="NAME", shown="the server's first", text="Model to ask for.")
    ] = None
    api: Annotated[
        Api, _flag(_T, "--api", text="completions: /v1/completions; chat: /v1/chat/completions.")
    ] = "completions"
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", envvar="BATON_API_KEY", rich_help_panel=_T, show_default="none",
            help="Rather set the variable: arguments are visible to everybody on the machine.",
        ),
    ] = None  # fmt: skip
    extra_body: Annotated[
        str, _flag(_T, "--extra-body", metavar="JSON", shown="none", text='More fields, like {"top_p": 0.9}.')
    ] = ""
    session_header: Annotated[
        str,
        _flag(_T, "--session-header", metavar="NAME", text="Header with a session's id, sent in every turn."),
    ] = "x-session-id"
    metrics_url: Annotated[
        list[str],
        _flag(
            _T, "--metrics-url", metavar="URL", shown="URL/metrics, and of Baton's workers",
            text="Prometheus page with the server's stages; may be repeated for several workers.",
        ),
    ] = field(default_factory=list)  # fmt: skip

    def __post_init__(self) -> None:
        for option, url in (("--url", self.url), *(("--metrics-url", u) for u in self.metrics_url)):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{option} {url!r} is no address. Write it like {DEFAULT_URL}.")
        self.extra_fields  # noqa: B018 - read for its error

    @property
    def base(self) -> str:
        """Without the slash or the /v1 that clients' configurations often end with."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def extra_fields(self) -> dict[str, Any]:
        try:
            found = json.loads(self.extra_body or "{}")
        except json.JSONDecodeError as e:
            raise ValueError(f"--extra-body {self.extra_body!r} is not JSON: {e}.") from e
        if not isinstance(found, dict):
            raise ValueError(f'--extra-body {self.extra_body!r} must be an object, like {{"top_p": 0.9}}.')
        return found


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What to send: lengths, or the conversations of a data set."""

    preset: Annotated[
        str | None,
        _flag(
            _W,
            "--preset",
            metavar="IN/OUT",
            shown=DEFAULT_PRESET,
            text=f"Lengths by name: {', '.join(PRESETS)}.",
        ),
    ] = None
    input_len: Annotated[
        str | None,
        _flag(
            _W, "--input-len", "--random-input-len", metavar="TOKENS", shown="the preset's",
            text=f"Prompt tokens, exact: {SYNTAX}",
        ),
    ] = None  # fmt: skip
    output_len: Annotated[
        str | None,
        _flag(
            _W, "--output-len", "--random-output-len", metavar="TOKENS", shown="the preset's",
            text="Output tokens, likewise.",
        ),
    ] = None  # fmt: skip
    prefix_len: Annotated[
        int,
        _flag(_W, "--prefix-len", metavar="TOKENS", text="Of the prompt, how many a group has in common."),
    ] = 0
    prefix_groups: Annotated[
        int, _flag(_W, "--prefix-groups", metavar="N", text="Groups of prompts that share their prefix.")
    ] = 0
    turns: Annotated[
        str,
        _flag(
            _W,
            "--turns",
            metavar="N",
            text="Requests in a session, each with all before it: a number as above.",
        ),
    ] = "1"
    think_time: Annotated[
        str,
        _flag(_W, "--think-time", metavar="SECONDS", text="Between an answer and the next turn: likewise."),
    ] = "0"
    dataset: Annotated[
        Path | None,
        _flag(
            _W, "--dataset", "--dataset-path", metavar="FILE", shown="none",
            text="ShareGPT-style JSON with conversations; 'sample' is one that comes with Baton.",
        ),
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"--preset {self.preset!r} is unknown. There are {', '.join(PRESETS)}.")
        if (self.prefix_groups > 0) != (self.prefix_len > 0) or self.prefix_groups < 0 or self.prefix_len < 0:
            raise ValueError(
                f"--prefix-groups {self.prefix_groups} and --prefix-len {self.prefix_len}: "
                "give both, or none."
            )
        if self.prefix_groups and self.input_distribution.least <= self.prefix_len:
            raise ValueError(
                f"--prefix-len {self.prefix_len}: the prefix is part of the prompt, but --input-len "
                f"{self.input_distribution} can be as short as {self.input_distribution.least:g}."
            )
        if self.turn_distribution.least < 1 and self.turn_distribution.kind in ("fixed", "uniform"):
            raise ValueError(f"--turns {self.turns}: a session has at least one turn. Try uniform:1,8.")
        if self.dataset is not None and (
            self.preset or self.input_len or self.output_len or self.prefix_groups
        ):
            raise ValueError(
                f"--dataset {self.dataset} brings its own lengths. Leave out --preset, --input-len, "
                "--output-len and the prefixes."
            )
        if self.dataset is not None and self.turn_distribution.kind != "fixed":
            raise ValueError(
                f"--turns {self.turns}: with --dataset it is the most turns of one conversation, a number."
            )
        self.input_distribution, self.output_distribution, self.think_distribution  # noqa: B018 - for errors

    @property
    def input_distribution(self) -> Distribution:
        return Distribution.parse(self.input_len or PRESETS[self.preset or DEFAULT_PRESET][0], "--input-len")

    @property
    def output_distribution(self) -> Distribution:
        return Distribution.parse(
            self.output_len or PRESETS[self.preset or DEFAULT_PRESET][1], "--output-len"
        )

    @property
    def turn_distribution(self) -> Distribution:
        return Distribution.parse(self.turns, "--turns")

    @property
    def think_distribution(self) -> Distribution:
        return Distribution.parse(self.think_time, "--think-time")


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What to send, and when: a trace in Mooncake's format."""

    speed: Annotated[
        float, _flag(_W, "--speed", metavar="FACTOR", text="2 replays the trace in half its time.")
    ] = 1.0
    length_scale: Annotated[
        float,
        _flag(
            _W, "--length-scale", metavar="FACTOR",
            text="Scales blocks, inputs and outputs alike, for models with a short context.",
        ),
    ] = 1.0  # fmt: skip
    block_size: Annotated[
        int, _flag(_W, "--block-size", metavar="TOKENS", text="Tokens of one of the trace's hash ids.")
    ] = MOONCAKE_BLOCK

    def __post_init__(self) -> None:
        _check_positive(
            {"--speed": self.speed, "--length-scale": self.length_scale, "--block-size": self.block_size}
        )


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """How much load. Without `rate` it is a closed loop."""

    rate: Annotated[
        float | None,
        _flag(
            _L, "--rate", "--request-rate", metavar="PER_SECOND", shown="closed loop",
            text="Open loop: sessions started a second, whatever the server does.",
        ),
    ] = None  # fmt: skip
    concurrency: Annotated[
        int | None,
        _flag(
            _L, "--concurrency", "--max-concurrency", metavar="N", shown=f"{DEFAULT_CONCURRENCY} users",
            text="Closed loop: users. With --rate: the most in flight; a wait for a place is latency.",
        ),
    ] = None  # fmt: skip
    arrivals: Annotated[
        ArrivalKind, _flag(_L, "--arrivals", text="How an open loop's starts are spread.")
    ] = "poisson"
    burstiness: Annotated[
        float,
        _flag(
            _L,
            "--burstiness",
            metavar="SHAPE",
            text="Of gamma: below 1 burstier than Poisson, above smoother.",
        ),
    ] = 1.0
    ramp_to: Annotated[
        float | None,
        _flag(
            _L,
            "--ramp-to",
            metavar="PER_SECOND",
            shown="none",
            text="Of ramp: the rate at the end of --duration.",
        ),
    ] = None

    def __post_init__(self) -> None:
        _check_positive(
            {
                "--rate": self.rate,
                "--concurrency": self.concurrency,
                "--burstiness": self.burstiness,
                "--ramp-to": self.ramp_to,
            }
        )
        if (self.arrivals == "ramp") != (self.ramp_to is not None):
            raise ValueError("--arrivals ramp and --ramp-to need each other: give both, or none.")
        if self.burstiness != 1.0 and self.arrivals != "gamma":
            raise ValueError(f"--burstiness {self.burstiness:g} is for --arrivals gamma.")


@dataclass(frozen=True, kw_only=True)
class PaceOptions:
    """How long, and by how many processes."""

    duration: Annotated[
        float | None,
        _flag(
            _L, "--duration", metavar="SECONDS", shown=f"{DEFAULT_DURATION:g}, unless --requests",
            text="How long new requests are sent.",
        ),
    ] = None  # fmt: skip
    requests: Annotated[
        int | None,
        _flag(
            _L, "--requests", "--num-prompts", metavar="N", shown="no limit", text="Sessions to send at most."
        ),
    ] = None
    warm_up: Annotated[
        float | None,
        _flag(
            _L, "--warmup", metavar="SECONDS", shown="detected",
            text="Excluded from all results. Detected by MSER-5 on TTFT; 0 excludes nothing.",
        ),
    ] = None  # fmt: skip
    drain: Annotated[
        float,
        _flag(
            _L, "--drain", metavar="SECONDS", text="Wait for answers after the last was sent; others fail.",
        ),
    ] = 60.0  # fmt: skip
    timeout: Annotated[
        float, _flag(_L, "--timeout", metavar="SECONDS", text="Of one request; a slower one has failed.")
    ] = 600.0
    processes: Annotated[
        int | None,
        _flag(
            _L, "--processes", metavar="N", shown="half the cores", text="Client processes to share the load."
        ),
    ] = None
    seed: Annotated[
        int | None,
        _flag(
            _L, "--seed", metavar="N", shown="random",
            text="Same seed, same prompts and times; a new one each run keeps prefix caches from helping.",
        ),
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        _check_positive(
            {
                "--duration": self.duration,
                "--requests": self.requests,
                "--timeout": self.timeout,
                "--processes": self.processes,
            }
        )
        for option, value in {"--warmup": self.warm_up, "--drain": self.drain, "--seed": self.seed}.items():
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{option} {value:g} must not be negative.")
        if self.warm_up is not None and self.duration is not None and self.warm_up >= self.duration:
            raise ValueError(
                f"--warmup {self.warm_up:g} leaves nothing of --duration {self.duration:g}. Make it shorter."
            )


@dataclass(frozen=True, kw_only=True)
class SloOptions:
    """What is good enough."""

    slo: Annotated[
        str, _flag(_O, "--slo", "--goodput", metavar="LIMITS", shown="none", text=f"{SLO_SYNTAX}.")
    ] = ""
    attainment: Annotated[
        float,
        _flag(_O, "--attainment", metavar="SHARE", text="Of the requests must be good for a run to be."),
    ] = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ValueError(f"--attainment {self.attainment:g} must be a share: more than 0, at most 1.")
        self.objectives  # noqa: B018 - read for its error

    @property
    def objectives(self) -> Slo:
        return Slo.parse(self.slo)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where results go beside the terminal."""

    json: Annotated[
        Path | None, _flag(_O, "--json", metavar="FILE", shown="none", text="Write the results as JSON.")
    ] = None
    html: Annotated[
        Path | None,
        _flag(_O, "--html", metavar="FILE", shown="none", text="Write the report as one HTML page."),
    ] = None
    jsonl: Annotated[
        Path | None,
        _flag(_O, "--jsonl", metavar="FILE", shown="none", text="Write every request as a line of JSON."),
    ] = None
    label: Annotated[
        str, _flag(_O, "--label", metavar="TEXT", shown="none", text="What reports call this run.")
    ] = ""
    quiet: Annotated[bool, _flag(_O, "--quiet", shown="off", text="No progress on stderr.")] = False

    def __post_init__(self) -> None:
        """A run must not be lost for a directory that is not there."""
        for option, path in {"--json": self.json, "--html": self.html, "--jsonl": self.jsonl}.items():
            if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
                raise ValueError(
                    f"{option} {path}: no file can be written there. Give a file in a directory that exists."
                )


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. `trace`, if there is one, says when and what; then `shape` only limits what is in flight."""

    target: TargetOptions = field(default_factory=TargetOptions)
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    shape: ShapeOptions = field(default_factory=ShapeOptions)
    pace: PaceOptions = field(default_factory=PaceOptions)
    slo: SloOptions = field(default_factory=SloOptions)
    trace: Path | None = None
    replay: TraceOptions = field(default_factory=TraceOptions)
    label: str = ""
    seed: int = field(default_factory=lambda: random.SystemRandom().randrange(1 << 31))

    def __post_init__(self) -> None:
        if self.shape.arrivals != "poisson" and self.shape.rate is None:
            raise ValueError(f"--arrivals {self.shape.arrivals} shapes an open loop: give its --rate.")
        if self.shape.ramp_to is not None and self.pace.duration is None:
            raise ValueError("--arrivals ramp reaches --ramp-to at the end of --duration: give it.")

    @property
    def schedule(self) -> Arrivals | None:
        shape = self.shape
        if shape.rate is None:
            return None
        ramp_to, seconds = (shape.ramp_to, self.pace.duration) if shape.ramp_to else (0.0, 0.0)
        return Arrivals(shape.arrivals, shape.rate, shape.burstiness, ramp_to or 0.0, seconds or 0.0)

    @property
    def process_count(self) -> int:
        """Half of the cores are left to the rest of the machine."""
        return self.pace.processes or max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))


def _check_positive(values: dict[str, float | None]) -> None:
    for option, value in values.items():
        if value is not None and not 0 < value < math.inf:
            hint = " For as fast as possible, give --concurrency instead." if option == "--rate" else ""
            raise ValueError(f"{option} {value:g} must be a positive number.{hint}")
