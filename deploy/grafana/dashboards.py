"""Generates the Grafana dashboards, and the alerts for Kubernetes: `python deploy/grafana/dashboards.py`.

docs/reference/metrics.md explains the series. Every dashboard has variables for the data source and model.
The label `role` distinguishes routers and workers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).with_name("dashboards")
ALERTS = DIRECTORY.parents[1] / "k8s" / "components" / "monitoring" / "alerts.yaml"
ALERTS_HEAD = """\
# Made by deploy/grafana/dashboards.py from deploy/grafana/rules.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: baton
spec:
"""
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
INTERVAL = "$__rate_interval"

Queries = dict[str, str]  # legend → PromQL


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str  # Grafana's name: "s", "reqps", "Bps", "percentunit", "short", …
    queries: Queries
    text: str = ""


def select(metric: str, role: str, more: str = "") -> str:
    return f'{metric}{{model_name=~"$model_name",role="{role}"{more}}}'


def rate(metric: str, role: str, by: str) -> Queries:
    """The rate per second, by a label."""
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({select(metric, role)}[{INTERVAL}]))"}


def total_rate(legend: str, metric: str, role: str) -> Queries:
    return {legend: f"sum(rate({select(metric, role)}[{INTERVAL}]))"}


def quantiles(metric: str, role: str, *wanted: float) -> Queries:
    buckets = f"sum by (le) (rate({select(metric + '_bucket', role)}[{INTERVAL}]))"
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {buckets})" for q in wanted or (0.5, 0.9, 0.99)}


def mean(metric: str, role: str) -> Queries:
    total, count = (f"sum(rate({select(f'{metric}_{end}', role)}[{INTERVAL}]))" for end in ("sum", "count"))
    return {"mean": f"{total} / {count}"}


def each(metric: str, role: str) -> Queries:
    """A gauge, one line per process."""
    return {"{{instance}}": select(metric, role)}


def all_of(legend: str, metric: str, role: str) -> Queries:
    return {legend: f"sum({select(metric, role)})"}


def engine(role: str) -> list[Panel]:
    """The panels that both roles of workers have."""
    return [
        Panel("Requests running", "short", each("vllm:num_requests_running", role)),
        Panel("Requests waiting for the engine", "short", each("vllm:num_requests_waiting", role)),
        Panel("KV blocks in use", "percentunit", each("vllm:kv_cache_usage_perc", role)),
        Panel("Engine step", "s", each("baton:step_seconds", role), "Mean of recent steps."),
        Panel(
            "Experts: busiest to mean", "short", each("baton:expert_imbalance", role),
            "Tokens of a layer's busiest expert to the mean of its experts.",
        ),
        Panel(
            "Experts used", "short", each("baton:experts_used", role),
            "Of one layer in one step, which reads the weights of these only.",
        ),
        Panel("Tokens sampled", "short", rate("vllm:generation_tokens_total", role, "instance")),
        Panel(
            "Preemptions", "short", rate("vllm:num_preemptions_total", role, "instance"),
            "Requests that had to make room. On decode they are prefilled again.",
        ),
    ]  # fmt: skip


CLUSTER = [
    Panel("Requests", "reqps", rate("vllm:request_success_total", "router", "finished_reason")),
    Panel("Errors", "reqps", rate("baton:request_errors_total", "router", "code")),
    Panel(
        "Retries", "ops", rate("baton:retries_total", "router", "cause"),
        "Attempts that a router replaced. Clients see a pause at most.",
    ),
    Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds", "router")),
    Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds", "router")),
    Panel("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds", "router")),
    Panel(
        "Tokens", "short",
        total_rate("prompt", "vllm:prompt_tokens_total", "router")
        | total_rate("output", "vllm:generation_tokens_total", "router"),
    ),
    Panel(
        "Workers", "short",
        {"{{pool}} {{state}}": f"max by (pool, state) ({select('baton:workers', 'router')})"},
    ),
    Panel(
        "Requests under way", "short",
        all_of("without a first token", "vllm:num_requests_waiting", "router")
        | all_of("running", "vllm:num_requests_running", "router"),
    ),
    Panel("KV blocks in use, prefill", "percentunit", each("vllm:kv_cache_usage_perc", "prefill")),
    Panel("KV blocks in use, decode", "percentunit", each("vllm:kv_cache_usage_perc", "decode")),
    Panel("KV sent", "Bps", rate("baton:kv_bytes_total", "prefill", "direction")),
    Panel(
        "Devices", "short",
        all_of("prefill", "baton:tensor_parallel_size", "prefill")
        | all_of("decode", "baton:tensor_parallel_size", "decode"),
        "GPUs that the workers of each pool span.",
    ),
]  # fmt: skip

ROUTER = [
    Panel(
        "Why requests wait", "short",
        all_of("not their turn", "baton:requests_waiting_for_turn", "router")
        | all_of("no room on decode", "baton:requests_waiting_for_room", "router")
        | all_of("no worker", "baton:requests_waiting_for_worker", "router"),
    ),
    Panel(
        "Prompt tokens waiting", "short", each("baton:tokens_waiting", "router"),
        "Of requests without a first token; the bound is --max-waiting-tokens.",
    ),
    Panel(
        "Handover gap", "s", quantiles("baton:handover_gap_seconds", "router"),
        "Between the tokens of prefill and decode, as clients see it.",
    ),
    Panel(
        "Event loop lag", "s", quantiles("baton:event_loop_lag_seconds", "router"),
        "All streams and new requests wait as long. More --router-processes help.",
    ),
    Panel("Deadlines expired", "ops", rate("baton:deadlines_expired_total", "router", "deadline")),
    Panel("Errors", "reqps", rate("baton:request_errors_total", "router", "code")),
    Panel("Retries", "ops", rate("baton:retries_total", "router", "cause")),
    Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds", "router")),
    Panel("Requests", "reqps", rate("vllm:request_success_total", "router", "instance")),
    Panel(
        "Workers left out", "short",
        {"{{pool}}": f"max by (pool) ({select('baton:workers_left_out', 'router')})"},
        "Their circuit breaker is open: they failed too often.",
    ),
    Panel(
        "Overflow", "reqps", rate("baton:overflow_total", "router", "reason"),
        "Requests whose prompt a decode worker computed.",
    ),
    Panel(
        "Up since", "dateTimeFromNow",
        {"{{instance}}": f"1000 * {select('baton:router_start_time_seconds', 'router')}"},
    ),
]  # fmt: skip

PREFILL = [
    Panel("Queue", "s", quantiles("vllm:request_queue_time_seconds", "prefill")),
    Panel("Prefill", "s", quantiles("vllm:request_prefill_time_seconds", "prefill")),
    Panel("Prompt tokens waiting", "short", each("baton:tokens_waiting", "prefill")),
    Panel("Prompt tokens computed", "short", rate("vllm:prompt_tokens_total", "prefill", "instance")),
    Panel("Measured speed (tokens/s)", "short", each("baton:prefill_tokens_per_second", "prefill")),
    Panel(
        "Finished, KV not yet acknowledged", "short", each("baton:held_prefills", "prefill"),
        "Grows where decode does not fetch in time.",
    ),
    Panel(
        "Prefix cache hits", "percentunit",
        {
            "of tokens": f"sum(rate({select('vllm:prefix_cache_hits_total', 'prefill')}[{INTERVAL}]))"
            f" / clamp_min(sum(rate({select('vllm:prefix_cache_queries_total', 'prefill')}[{INTERVAL}])), 1)"
        },
    ),
    Panel(
        "Prompt tokens fetched, not computed", "short",
        rate("baton:prefix_fetched_tokens_total", "prefill", "tier"),
        "From the caches of other workers, by tier, and from the shared store.",
    ),
    Panel(
        "Shared store: chunks", "ops", rate("baton:store_chunks_total", "prefill", "result"),
        "refused: the store is full or gone. missed: wrong, or gone when they were read.",
    ),
    *engine("prefill"),
]  # fmt: skip

DECODE = [
    Panel("Decode", "s", quantiles("vllm:request_decode_time_seconds", "decode")),
    Panel(
        "Handover", "s", quantiles("baton:handover_seconds", "decode"),
        "Prefill's first token to decode's second.",
    ),
    Panel("Reserved, waiting for KV", "short", each("baton:reservations", "decode")),
    *engine("decode"),
]  # fmt: skip

TRANSFER = [
    Panel(
        "KV moved", "Bps",
        total_rate("sent", "baton:kv_bytes_total", "prefill")
        | total_rate("received", "baton:kv_bytes_total", "decode"),
    ),
    Panel("Transfer", "s", quantiles("baton:kv_transfer_seconds", "decode"), "First frame to last."),
    Panel(
        "Exposed", "s", quantiles("baton:kv_exposed_seconds", "decode"),
        "Prefill's first token to the end of the injection: what the forward did not hide.",
    ),
    Panel("Hidden share", "percentunit", mean("baton:kv_hidden_share", "decode")),
    Panel("Injection", "s", quantiles("baton:kv_injection_seconds", "decode"), "All copies into the blocks."),
    Panel("Fetch", "s", quantiles("baton:kv_fetch_seconds", "decode"), "FETCH to the end of the injection."),
    Panel(
        "Transfers ended", "ops", rate("baton:kv_transfers_total", "decode", "reason"),
        "`injected` is the good end.",
    ),
    Panel(
        "Open", "short",
        all_of("transfers", "baton:kv_transfers_open", "decode")
        | all_of("FETCHes waiting", "baton:kv_fetches_waiting", "prefill"),
    ),
    Panel(
        "Sessions and lanes", "short",
        all_of("sessions", "baton:kv_sessions", "decode") | all_of("lanes", "baton:kv_lanes", "decode"),
    ),
    Panel(
        "Peers by transport", "short",
        {"{{transport}}": 'sum by (transport) (baton:kv_readers{model_name=~"$model_name"})'},
        "Workers that fetch KV from others. `baton status` shows why some use TCP.",
    ),
    Panel(
        "Arena slots free", "short",
        {"{{role}} {{instance}} {{direction}}": 'baton:kv_arena_slots_free{model_name=~"$model_name"}'},
    ),
    Panel("Bad frames", "ops", rate("baton:kv_checksum_failures_total", "decode", "kind")),
    Panel("Refused", "ops", rate("baton:kv_refused_total", "prefill", "reason"), "Peers and frames."),
    Panel("Deadlines expired, prefill", "ops", rate("baton:deadlines_expired_total", "prefill", "deadline")),
    Panel("Deadlines expired, decode", "ops", rate("baton:deadlines_expired_total", "decode", "deadline")),
    Panel(
        "Frames", "ops",
        total_rate("in time", "baton:kv_frames_total", "decode")
        | total_rate("late", "baton:kv_late_frames_total", "decode"),
    ),
]  # fmt: skip

DASHBOARDS = {
    "cluster": CLUSTER,
    "router": ROUTER,
    "prefill": PREFILL,
    "decode": DECODE,
    "kv-transfer": TRANSFER,
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(number: int, shown: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": shown.title,
        "description": shown.text,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": shown.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(shown.queries.items())
        ],
    }


def dashboard(name: str, panels: list[Panel]) -> dict[str, Any]:
    models = "label_values(vllm:cache_config_info, model_name)"
    return {
        "uid": f"baton-{name}",
        "title": f"Baton: {name}",
        "tags": ["baton"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model_name", "type": "query", "datasource": SOURCE, "query": models,
                    "refresh": 2, "includeAll": True, "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "links": [{"type": "dashboards", "tags": ["baton"], "title": "Baton", "asDropdown": True}],
        "panels": [panel(number, shown) for number, shown in enumerate(panels)],
    }  # fmt: skip


def rendered() -> dict[str, str]:
    """The dashboards: file name → content."""
    return {
        f"{name}.json": json.dumps(dashboard(name, panels), indent=1) + "\n"
        for name, panels in DASHBOARDS.items()
    }


def alerts() -> str:
    """The rules for the Prometheus operator. kustomize would include their file only as a ConfigMap."""
    lines = DIRECTORY.with_name("rules.yaml").read_text().splitlines()
    return ALERTS_HEAD + "".join(f"  {line}".rstrip() + "\n" for line in lines[lines.index("groups:") :])


if __name__ == "__main__":
    for name, content in rendered().items():
        (DIRECTORY / name).write_text(content)
    ALERTS.write_text(alerts())
