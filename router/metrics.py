"""The metrics of a router. Names that begin with `vllm:` have the meaning that they have in vLLM."""

import math
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.router.admission.parked import Parked
from baton.router.admission.queue import Admission
from baton.router.errors import ApiError, all_errors, error_code
from baton.router.history import History
from baton.router.policy.plan import REASONS, Reason, why
from baton.router.workers.pool import WorkerPool
from baton.router.workers.worker import WorkerState
from baton.rpc import worker_pb2 as pb

M = TypeVar("M", Counter, Gauge)

disable_created_metrics()  # each counter would have one more series

_LATENCY = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640
)  # fmt: skip
_INTERVAL = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.5, 1, 2.5, 10, 40,
)  # fmt: skip
FINISH_REASONS = ("stop", "length", "abort", "error")
RETRY_CAUSES = (
    "lost",
    "mismatch",
    "returned",
    *(name.removeprefix("FAILURE_CODE_").lower() for name in pb.FailureCode.keys()),  # noqa: SIM118
)
DEADLINES = ("request", "worker_wait", "pause")


class Histogram(Collector):
    """A histogram that is observed on the event loop alone, some with each token. That of the library takes
    ten times as long, since it has locks and passes the buckets one by one."""

    def __init__(self, name: str, text: str, labels: dict[str, str], buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._labels, self._buckets = name, text, labels, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = map(floatToGoString, (*self._buckets, math.inf))
        up_to = [*zip(bounds, accumulate(self._counts), strict=True)]
        family.add_metric(list(self._labels.values()), up_to, self._sum)
        yield family


class TokenCounter(Collector):
    """A counter that is added to with each token, for the same reason."""

    def __init__(self, name: str, text: str, labels: dict[str, str]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.count = 0

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.count)
        yield family


class _Workers(Collector):
    """Workers by pool, counted for each scrape. A pool of encoders is there once the router has had one: the
    alert for a pool without workers must not fire where none is wanted."""

    def __init__(self, workers: WorkerPool, labels: dict[str, str]) -> None:
        self._workers, self._labels = workers, labels

    def collect(self) -> Iterator[GaugeMetricFamily]:
        pools, now = self._workers, time.monotonic()
        states = Counts((each.pool, each.state) for each in pools.listed.values())
        open_breakers = Counts(each.pool for each in pools.listed.values() if each.breaker.open_for(now) > 0)
        labels = [*self._labels, "pool"]
        workers = GaugeMetricFamily(
            "baton:workers", "Workers on this router's list.", labels=[*labels, "state"]
        )
        left_out = GaugeMetricFamily(
            "baton:workers_left_out", "Workers whose circuit breaker is open.", labels=labels
        )
        encoders = {pb.POOL_ENCODE: "encode"} if pools.encoders.had_encoder else {}
        for pool, name in (pools.pools | encoders).items():
            values = [*self._labels.values(), name]
            left_out.add_metric(values, open_breakers[pool])
            for state in WorkerState:
                workers.add_metric([*values, str(state)], states[pool, state])
        yield workers
        yield left_out


class Metrics:
    """Of one router. All series have the labels `model_name` and `role`.

    Every known label value is exported from the start, so that rates and alerts see the first event too.
    """

    def __init__(self, model_name: str) -> None:
        self.history = History()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._labels = {"model_name": model_name, "role": "router"}

        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests without a first token.")
        self.running = self._gauge("vllm:num_requests_running", "Requests that are producing tokens.")
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From the headers of the request to its first token.",
            _LATENCY,
        )
        self.preparation = self._histogram(
            "baton:preparation_seconds", "From the headers of a request to its tokens.", _LATENCY
        )
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request.", _INTERVAL
        )
        self.e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the headers of the request to its end.", _LATENCY
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts that have a first token.")
        self.generation_tokens = TokenCounter(
            "vllm:generation_tokens", "Tokens sent to clients.", self._labels
        )
        self.registry.register(self.generation_tokens)
        self.finished = self._counters(
            "vllm:request_success", "Requests by how they ended.", "finished_reason", FINISH_REASONS
        )
        self.handover_gap = self._histogram(
            "baton:handover_gap_seconds", "Between the tokens of prefill and decode.", _INTERVAL
        )
        self.queue = self._histogram(
            "baton:router_queue_seconds", "From the request to its first submission to a worker.", _LATENCY
        )
        self.loop_lag = self._histogram(
            "baton:event_loop_lag_seconds", "How late the event loop runs a timer.", _INTERVAL
        )
        self.own_loop_lag = self._histogram(
            "baton:event_loop_own_lag_seconds", "The same without the wait for a CPU.", _INTERVAL
        )
        self.retries = self._counters(
            "baton:retries", "Attempts that were replaced, by cause.", "cause", RETRY_CAUSES
        )
        self.overflow = self._counters(
            "baton:overflow", "Requests that one worker prefills and decodes.", "reason", REASONS
        )
        self._costs: dict[Reason, Mapping[str, float]] = {}  # of the last plan with this reason
        self.split_prompts = self._counter(
            "baton:split_prompts", "Prompts that several workers computed at the same time."
        )
        self.deadlines = self._counters(
            "baton:deadlines_expired", "Waits that were given up.", "deadline", DEADLINES
        )
        codes = [error_code(kind) for kind in all_errors()]
        self._errors = self._counters(
            "baton:request_errors", "Requests answered with an error.", "code", codes
        )
        started = self._gauge("baton:router_start_time_seconds", "Unix time at which the router started.")
        started.set(time.time())  # noqa: TID251 - a timestamp

    def follow(self, pool: WorkerPool, admission: Admission, parked: Parked) -> None:
        """Adds the gauges of waiting requests and of workers, which each scrape reads anew."""
        self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV blocks of decode workers in use, 0 to 1."
        ).set_function(lambda: pool.desk.decodes.usage)
        self._gauge("baton:body_bytes", "Bytes of requests that are read or prepared.").set_function(
            lambda: admission.body_bytes
        )
        self._gauge("baton:tokens_waiting", "Prompt tokens of requests without a first token.").set_function(
            lambda: admission.waiting_tokens
        )
        self._gauge(
            "baton:expected_wait_seconds", "How long a new request would wait for its first token."
        ).set_function(lambda: admission.expected_wait)
        self._gauge(
            "baton:tokens_waiting_for_turn",
            "Prompt tokens, in no cache, that wait in the router for prefill workers.",
        ).set_function(lambda: admission.held_tokens)
        self._gauge(
            "baton:requests_waiting_for_turn", "Requests that wait in the router for prefill workers."
        ).set_function(lambda: len(admission.queue) - admission.waiting_for_decode)
        self._gauge(
            "baton:requests_waiting_for_room", "Requests that wait for capacity on a decode worker."
        ).set_function(lambda: admission.waiting_for_decode)
        self._gauge(
            "baton:requests_waiting_for_worker",
            "Requests that wait because a pool has no worker, or for the end of a pause.",
        ).set_function(lambda: len(parked.without_worker))
        self._gauge(
            "baton:requests_waiting_for_retry", "Requests that wait for the retry budget."
        ).set_function(lambda: len(parked.without_budget))
        self._gauge(
            "baton:paused",
            "1: new requests wait, since the cluster is paused. 2: no step is computed, either.",
        ).set_function(lambda: pool.pause)
        self.registry.register(_Workers(pool, self._labels))

    def certificate_ends(self, at: float) -> None:
        """`at`: the Unix time until which the certificate for clients is valid."""
        text = "Unix time at which the certificate ends with which the router serves clients."
        self._gauge("baton:certificate_expiry_time_seconds", text).set(at)

    def failed(self, error: ApiError, request_id: str = "") -> None:
        """Counts a request that was answered with an error."""
        self._errors[error_code(type(error))].inc()
        self.history.failed(error, request_id)

    def on_one_worker(self, reason: Reason, costs: Mapping[str, float]) -> None:
        """Counts a request that one worker computes. `costs`: of its plan."""
        self.overflow[reason].inc()
        self._costs[reason] = costs

    def paths(self) -> dict[str, Any]:
        """How the requests so far went through the workers, for the status of the router."""
        errors = {code: _count(counter) for code, counter in self._errors.items()}
        return {
            "errors": {code: count for code, count in errors.items() if count},
            "retries": {cause: n for cause, each in self.retries.items() if (n := _count(each))},
            "handovers": _count(self.handover_gap),
            "split_prompts": _count(self.split_prompts),
            "overflow": {reason: _count(counter) for reason, counter in self.overflow.items()},
            "overflow_why": {reason: why(reason, costs) for reason, costs in self._costs.items()},
        }

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    # ------------------------------------------------------------ families

    def _family(self, kind: type[M], name: str, text: str, *labels: str) -> M:
        return kind(name, text, [*self._labels, *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, self._labels, buckets)
        self.registry.register(histogram)
        return histogram

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._family(Gauge, name, text).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, text).labels(**self._labels)

    def _counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        family = self._family(Counter, name, text, label)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}


def _count(metric: Counter | Histogram) -> int:
    """The value of a counter, or how often a histogram was observed."""
    [family] = metric.collect()
    [value] = (sample.value for sample in family.samples if sample.name.endswith(("_total", "_count")))
    return int(value)
