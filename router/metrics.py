"""What a router counts, under the names that dashboards for vLLM already read; `baton:` is what is ours."""

import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

disable_created_metrics()  # one more series for each, which nobody reads

_LATENCY = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640
)  # fmt: skip
_INTERVAL = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.5, 1, 2.5, 10, 40,
)  # fmt: skip
FINISH_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """All series carry the label `model_name`. Owned by one router."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model_name"], registry=self.registry).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=self.registry).labels(model_name)

        self.waiting = gauge("vllm:num_requests_waiting", "Requests without a first token.")
        self.running = gauge("vllm:num_requests_running", "Requests that are producing tokens.")
        self.time_to_first_token = histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", _LATENCY
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request.", _INTERVAL
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From the request to its end.", _LATENCY)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of answered requests.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens sent to clients.")
        success = Counter(
            "vllm:request_success",
            "Requests by how they ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.finished = {reason: success.labels(model_name, reason) for reason in FINISH_REASONS}
        self.handover_gap = histogram(
            "baton:handover_gap_seconds", "Between the tokens of prefill and decode.", _INTERVAL
        )
        self._retries = Counter(
            "baton:retries", "Attempts that were replaced.", ["model_name", "cause"], registry=self.registry
        )
        self._model_name = model_name
        started = gauge("baton:router_start_time_seconds", "Unix time at which the router started.")
        started.set(time.time())

    def retried(self, cause: str) -> None:
        self._retries.labels(self._model_name, cause).inc()

    def exposition(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
