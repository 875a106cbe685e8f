"""Merged metrics of several processes: sums that never fall, and values that are not added."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.router.processes.merged_metrics import MergedMetrics


def page(requests: int, waiting: int, workers: int, *seconds: float) -> bytes:
    registry = CollectorRegistry()
    counter = Counter("vllm:request_success", "Ends.", ["reason"], registry=registry)
    counter.labels("stop").inc(requests)
    Gauge("vllm:num_requests_waiting", "Waiting.", registry=registry).set(waiting)
    known = Gauge("baton:workers", "Workers.", ["state"], registry=registry)
    known.labels("ready").set(workers)
    known.labels("lost").set(4 - workers)
    Gauge("vllm:kv_cache_usage_perc", "KV.", registry=registry).set(waiting / 10)
    Gauge("baton:paused", "1: new requests wait.", registry=registry).set(1)
    Gauge("process_open_fds", "Files.", registry=registry).set(7)
    Counter("process_cpu_seconds", "CPU.", registry=registry).inc(1.0)
    histogram = Histogram("vllm:ttft_seconds", "First token.", registry=registry, buckets=(0.1, 1))
    for observed in seconds:
        histogram.observe(observed)
    return generate_latest(registry)


def read(text: bytes) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "le")
            le = f"<{sample.labels['le']}" if "le" in sample.labels else ""
            if not sample.name.endswith("_created"):
                found[f"{sample.name}{le}" + (f"[{labels}]" if labels else "")] = sample.value
    return found


def test_two_processes_have_one_page():
    text = MergedMetrics().page({"0": page(3, 1, 4, 0.05, 0.5), "1": page(2, 5, 3, 2.0)})
    assert b"# TYPE vllm:request_success_total counter" in text
    assert b"# HELP vllm:num_requests_waiting Waiting." in text
    assert read(text) == {
        "vllm:request_success_total[reason=stop]": 5,
        "vllm:num_requests_waiting": 6,
        "baton:workers[state=ready]": 3,  # of the process that reaches the fewest
        "baton:workers[state=lost]": 1,
        "vllm:kv_cache_usage_perc": 0.5,  # of the workers, which both know
        "baton:paused": 1,
        "process_open_fds[process=0]": 7,
        "process_open_fds[process=1]": 7,
        "process_cpu_seconds_total[process=0]": 1,
        "process_cpu_seconds_total[process=1]": 1,
        "vllm:ttft_seconds_bucket<0.1": 1,
        "vllm:ttft_seconds_bucket<1.0": 2,
        "vllm:ttft_seconds_bucket<+Inf": 3,
        "vllm:ttft_seconds_count": 3,
        "vllm:ttft_seconds_sum": 2.55,
    }


def test_counters_of_a_dead_process_stay():
    merged = MergedMetrics()
    merged.page({"0": page(3, 1, 1, 0.05), "1": page(2, 5, 1, 0.5)})
    merged.ended("1")
    now = read(merged.page({"0": page(4, 1, 1, 0.05)}))
    assert now["vllm:request_success_total[reason=stop]"] == 6
    assert now["vllm:ttft_seconds_count"] == 2
    assert now["vllm:num_requests_waiting"] == 1, "nothing waits in a dead process"
    assert "process_cpu_seconds_total[process=1]" not in now
    again = read(merged.page({"0": page(4, 1, 1, 0.05), "1": page(1, 0, 1)}))
    assert again["vllm:request_success_total[reason=stop]"] == 7
    merged.ended("1")
    merged.ended("1")
    assert read(merged.page({}))["vllm:request_success_total[reason=stop]"] == 7


def test_a_process_without_a_reply_counts_with_its_last_page():
    merged = MergedMetrics()
    merged.page({"0": page(3, 1, 1), "1": page(2, 5, 1)})
    assert read(merged.page({"0": page(3, 1, 1)}))["vllm:request_success_total[reason=stop]"] == 5
