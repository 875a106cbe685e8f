"""One request, seen from outside: its trace, its log lines and what it adds to the metrics agree with what
its client got."""

import asyncio
import contextlib
import json
import os
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.bench.lab.harness.cluster import LocalCluster, status
from baton.bench.lab.harness.streams import Case, Stream, read
from baton.bench.lab.harness.workers import metric
from tests.grafana import RULES, expressions, rules
from tests.otlp import Receiver, Span
from tests.prometheus import Prometheus
from tests.shallow import LAYERS
from tests.within import WITHIN

from .recovery import LONG, SHORT, Broken

pytestmark = pytest.mark.all

KV_BYTES = LAYERS * 2 * 3 * 64 * 4  # of one position: layers, K and V, KV heads, head_dim, float32
CASE = LONG[1]


async def ask(cluster: LocalCluster, stream: Stream, name: str, trace_id: str) -> None:
    headers = {"x-request-id": name, "traceparent": f"00-{trace_id}-{'ab' * 8}-01"}
    async with aiohttp.ClientSession(headers=headers) as http:
        await read(http, cluster.url, stream.case, into=stream)
    assert not stream.failed, stream.error


def new_ids() -> tuple[str, str]:
    """Names a request, and its trace."""
    return f"mine-{os.urandom(4).hex()}", os.urandom(16).hex()


def by_name(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.name].append(span)
    return found


def counted(cluster: LocalCluster) -> dict[str, float]:
    status(cluster.url)  # a scrape shows the last report, and this makes one
    found = {"client": metric(cluster.url, "vllm:generation_tokens_total")}
    for role in ("prefill", "decode"):
        for name in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "baton:kv_bytes_total"):
            found[f"{role} {name}"] = sum(worker.metric(name) for worker in cluster.of(role))
    return found


def losses(cluster: LocalCluster) -> float:
    """Attempts that were replaced because their worker was lost."""
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=WITHIN) as page:
        [line] = [
            x for x in page.read().decode().splitlines() if x.startswith('baton:retries_total{cause="lost"')
        ]
    return float(line.rpartition(" ")[2])


def logged(cluster: LocalCluster, name: str) -> list[dict[str, Any]]:
    """What all processes wrote about a request."""
    lines = [line for log in cluster.directory.glob("*.log") for line in log.read_text().splitlines()]
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(records) > 0.9 * len(lines), "gRPC's C core and a dying interpreter write as they like"
    for record in records:
        assert record["role"] in ("router", "prefill", "decode")
        assert {"index", "incarnation", "level", "logger", "message", "time"} <= record.keys()
    return [record for record in records if record.get("request_id") == name]


async def test_one_request_is_one_trace(broken: Broken, otlp: Receiver) -> None:
    await asyncio.to_thread(broken.all_back)
    cluster, (name, trace_id) = broken.cluster, new_ids()
    before = await asyncio.to_thread(counted, cluster)
    stream = Stream(CASE)
    await ask(cluster, stream, name, trace_id)
    spans = by_name(otlp.trace(trace_id, 8))
    assert {key: len(found) for key, found in spans.items()} == dict.fromkeys(
        (
            "request",
            "prefill attempt",
            "decode attempt",
            "queue",
            "prefill",
            "transfer",
            "injection",
            "decode",
        ),
        1,
    )
    one = {key: found[0] for key, found in spans.items()}
    tree = {
        "request": ("router", ("prefill attempt", "decode attempt")),
        "prefill attempt": ("router", ("queue", "prefill")),
        "decode attempt": ("router", ("transfer", "injection", "decode")),
    }
    assert one["request"].parent == "ab" * 8
    for parent, (_, children) in tree.items():
        for child in children:
            assert one[child].parent == one[parent].id
            assert one[parent].start <= one[child].start <= one[child].end <= one[parent].end, (parent, child)
    for key, span in one.items():
        role = tree[key][0] if key in tree else "prefill" if key in ("queue", "prefill") else "decode"
        assert span.process.startswith(f"baton-{role} ")
        assert span.error is None
        if role != "router":
            assert span.attributes["gen_ai.request.id"] == name
    assert abs(one["queue"].end - one["prefill"].start) < 1_000_000  # ns
    assert one["transfer"].start < one["prefill"].end, "KV moves while the prompt is computed"
    assert one["injection"].end <= one["decode"].start + 1_000_000
    tokens = len(stream.token_ids)
    asked = one["request"].attributes
    assert asked["gen_ai.usage.completion_tokens"] == tokens == CASE.max_tokens
    assert one["decode"].attributes["gen_ai.usage.completion_tokens"] == tokens - 1
    prompt = asked["gen_ai.usage.prompt_tokens"]
    assert one["prefill"].attributes["gen_ai.usage.prompt_tokens"] == prompt > 64, "more than one chunk"
    assert one["transfer"].attributes["baton.kv.bytes"] == prompt * KV_BYTES

    after = await asyncio.to_thread(counted, cluster)
    assert {key: value - before[key] for key, value in after.items()} == {
        "client": tokens,
        "prefill vllm:generation_tokens_total": 1,
        "decode vllm:generation_tokens_total": tokens - 1,
        "prefill vllm:prompt_tokens_total": prompt,
        "decode vllm:prompt_tokens_total": 0,
        "prefill baton:kv_bytes_total": prompt * KV_BYTES,
        "decode baton:kv_bytes_total": prompt * KV_BYTES,
    }

    about = logged(cluster, name)
    told = {
        role: [r["message"] for r in about if r["role"] == role] for role in ("router", "prefill", "decode")
    }
    assert [m.split(": ", 1)[1].split(" at ")[0] for m in told["router"][:2]] == ["prefill", "decode"]
    assert f" 200, {prompt} + {tokens} tokens, 0 cached, length, " in told["router"][-1]
    assert [" accepted" in m for m in told["prefill"]] == [True, False]
    assert f"prefilled {prompt} tokens" in told["prefill"][1]
    assert f"{prompt * KV_BYTES} bytes of KV" in told["decode"][1]
    assert f"decoded {tokens - 1} tokens" in told["decode"][2]
    text = "".join(log.read_text() for log in cluster.directory.glob("*.log"))
    assert CASE.prompt[4:30] not in text


async def test_a_retry_is_a_second_prefill(broken: Broken, otlp: Receiver) -> None:
    """Of a request whose prefill worker is killed while it computes."""
    await asyncio.to_thread(broken.all_back)
    cluster = broken.cluster
    before = await asyncio.to_thread(losses, cluster)
    while True:  # until a request could be disturbed before its end
        name, trace_id = new_ids()
        stream = Stream(Case("A long story. " * 120, 4, 0.0, 1))
        asking = asyncio.create_task(ask(cluster, stream, name, trace_id))
        while not asking.done():
            if await asyncio.to_thread(broken.transferring, [stream]):
                break
            await asyncio.sleep(0.01)
        if not asking.done():
            break
    victim = await asyncio.to_thread(broken.busiest, "prefill")
    victim.kill("service")
    await asking
    spans = by_name(otlp.trace(trace_id, 9))
    first, second = spans["prefill attempt"]
    assert first.attributes["baton.worker"].startswith(f"prefill {victim.index} ")
    assert first.error == "the worker was lost"
    assert second.error is None
    [prefill] = spans["prefill"]  # the first one's was lost with its worker
    assert prefill.parent == second.id
    assert prefill.process != f"baton-{victim.name}"
    assert {spans["request"][0].id} == {span.parent for span in (first, second)}
    assert await asyncio.to_thread(losses, cluster) == before + 1
    told = [record["message"] for record in logged(cluster, name) if record["level"] == "INFO"]
    assert any("failed (lost)" in message for message in told), told
    await broken.settled()


async def test_prometheus_finds_data_for_every_query(broken: Broken, tmp_path: Path) -> None:
    """Of every panel and rule, while there is a little load. Only a mixture has the metrics of experts, only
    a worker with a shared store those of the store, and only a router with TLS that of its certificate. No
    encoder runs here."""
    await asyncio.to_thread(broken.all_back)
    cluster, loaded = broken.cluster, asyncio.Event()

    async def load() -> None:
        while not loaded.is_set():
            await broken.ride([LONG[0], SHORT[0]])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await loaded.wait()

    def look() -> None:
        with Prometheus(tmp_path, RULES, cluster.url.removeprefix("http://")) as prometheus:
            workers = len(cluster.workers)
            prometheus.wait_for(lambda: sum(prometheus.values("up")) == 1 + workers, "all targets")
            missing = [*expressions(), *(rule["record"] for rule in rules() if "record" in rule)]
            missing = [
                query
                for query in missing
                if not re.search(
                    'baton:(expert|store|certificate|image|encode|request_encode)|role="encode"', query
                )
            ]

            def answered() -> bool:
                missing[:] = prometheus.without_numbers(missing)
                return not missing

            prometheus.wait_for(answered, "all queries", lambda: "no data for:\n" + "\n".join(missing))
            firing = {alert["labels"]["alertname"] for alert in prometheus.alerts()}
            assert "BatonNoWorker" not in firing

    loading = asyncio.create_task(load())
    try:
        await asyncio.to_thread(look)
    finally:
        loaded.set()
        await loading
    await broken.settled()
