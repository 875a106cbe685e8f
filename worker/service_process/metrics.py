"""The Prometheus metrics of a worker. Metrics that vLLM has keep vLLM's names; all others are `baton:*`.

The engine and transfer processes keep the counters and report them. A scrape converts their last reports to
metrics. Only the histograms are kept here.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.content import Tier
from baton.engine import ExpertStats, OffloadStats
from baton.kv_transfer import InjectStats, TransferStats
from baton.machine.system import family
from baton.worker.messages import Decoded, EngineReady, EngineStatus, Prefilled

disable_created_metrics()  # each counter and histogram would get one more series

ANSWER_SECONDS = 5.0
"""For a client to send its request and to take the page."""
# Prometheus prefers OpenMetrics, but there prometheus_client writes vllm_x instead of vllm:x.
_HEAD = (
    b"HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n"
)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LONG_SECONDS = (*_SECONDS[4:], 20.0, 50.0, 100.0, 200.0, 500.0)
# These label values are exported from the start with 0, so that rates and alerts see the first event.
_CHECKSUMS = ("header", "payload", "control", "tag")
REFUSED = (
    "hello", "secret", "encryption", "side", "self", "version", "model", "layout", "dtype", "scales", "ranks",
    "limits", "transfer_id",
)  # fmt: skip
_DEADLINES = ("handshake", "fetch_wait", "hold", "pin", "unreachable", "progress", "peer_dead", "engine_dead")
_TRANSFERS = ("acked", "busy", "injected", "cancelled", "deadline", "finished", "gone", "integrity", "lost")
_TIERS = tuple(tier.name.lower() for tier in Tier)
_TRANSPORTS = ("cuda_ipc", "nixl", "nixl_cuda", "shared_memory", "tcp")
_SHARES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


class Metrics(Collector):
    """The metrics of a worker. Owns the registry and, after `listen`, an HTTP server.

    The owner sets `engine_status` and `transfer_stats` to the last reports, and `role` to the current pool.
    """

    def __init__(self, role: str, model_name: str, tensor_parallel_size: int = 1) -> None:
        self.role = role
        self._model_name = model_name
        self._tensor_parallel_size = tensor_parallel_size
        self._cache_config: dict[str, str] = {}
        self.engine_status: EngineStatus | None = None
        self.transfer_stats: TransferStats | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._server: asyncio.Server | None = None
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Time from acceptance to the start of the prefill.", _SECONDS
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds",
            "Time from the start of the prefill to the first token.",
            _SECONDS,
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds",
            "Time from the end of KV injection to the last token.",
            _LONG_SECONDS,
        )
        self._transfer = self._histogram(
            "baton:kv_transfer_seconds", "Time from the first KV frame to the last.", _SECONDS
        )
        self._injection = self._histogram(
            "baton:kv_injection_seconds",
            "Time from the start of the first copy into the blocks to the end of the last.",
            _SECONDS,
        )
        self._exposed = self._histogram(
            "baton:kv_exposed_seconds",
            "Time from prefill's first token to the end of KV injection.",
            _SECONDS,
        )
        self._fetch = self._histogram(
            "baton:kv_fetch_seconds", "Time from FETCH to the end of KV injection.", _SECONDS
        )
        self._hidden = self._histogram(
            "baton:kv_hidden_share", "1 - exposed / transfer seconds, for each transfer.", _SHARES
        )
        self._handover = self._histogram(
            "baton:handover_seconds", "Time from prefill's first token to decode's second.", _SECONDS
        )

    @property
    def _labels(self) -> dict[str, str]:
        return {"model_name": self._model_name, "role": self.role}

    async def listen(self, host: str, port: int, serves: Callable[[], bool]) -> int:
        """Starts the HTTP server. Returns the port. Raises OSError if the port is in use.

        /health has the status 200 if `serves` says so, and else 503. A kubelet can ask here, since it has no
        certificate for the gRPC port. An event loop that hangs gives no answer.
        """
        listening = socket.create_server((host, port), family=family(host))
        self._server = await asyncio.start_server(partial(self._answer, serves), sock=listening)
        return listening.getsockname()[1]

    async def _answer(
        self, serves: Callable[[], bool], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answers /health, and any other request with the page. Then closes. An idle one is closed, too."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                path = (await reader.readuntil(b"\r\n\r\n")).partition(b" ")[2].partition(b" ")[0]
                if path == b"/health":
                    status, page = b"200 OK" if serves() else b"503 Service Unavailable", b""
                else:
                    status, page = b"200 OK", await asyncio.to_thread(generate_latest, self.registry)
                writer.write(_HEAD % (status, len(page)) + page)
                await writer.drain()
            writer.close()
        except (OSError, EOFError, asyncio.LimitOverrunError):
            writer.transport.abort()  # the client is slow, gone, or does not speak HTTP

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def cache_config(self, engine: EngineReady, prefix_caching: bool) -> None:
        self._cache_config = {
            "block_size": str(engine.block_size),
            "num_gpu_blocks": str(engine.num_blocks),
            "cache_dtype": engine.layout.dtype,
            "enable_prefix_caching": str(prefix_caching),
        }

    def prefilled(self, message: Prefilled) -> None:
        self._observe(self._queue, message.began_at - message.queued_at)
        self._observe(self._prefill, message.token_at - message.began_at)

    def decoded(self, message: Decoded) -> None:
        self._observe(self._decode, message.ended_at - message.joined_at)

    def injected(self, stats: InjectStats) -> None:
        self._observe(self._transfer, stats.transfer_seconds)
        self._observe(self._injection, stats.injection_seconds)
        self._observe(self._exposed, stats.exposed_seconds)
        self._observe(self._fetch, stats.fetch_seconds)
        self._observe(self._hidden, stats.hidden_share)

    def handover(self, seconds: float) -> None:
        self._observe(self._handover, seconds)

    def collect(self) -> Iterable[Metric]:
        yield self._info()
        yield self._gauge(
            "baton:tensor_parallel_size", "Devices that this worker spans.", self._tensor_parallel_size
        )
        if self.engine_status is not None:
            yield from self._of_engine(self.engine_status)
        if self.transfer_stats is not None:
            yield from self._of_transfer(self.transfer_stats)

    # ------------------------------------------------------------ families

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, tuple(self._labels), registry=self.registry, buckets=buckets)
        family.labels(**self._labels)  # exported from the start
        return family

    def _observe(self, family: Histogram, value: float) -> None:
        family.labels(**self._labels).observe(value)

    def _info(self) -> Metric:
        value = self._labels | self._cache_config
        return InfoMetricFamily("vllm:cache_config", "KV cache of the engine.", value=value)

    def _of_engine(self, status: EngineStatus) -> Iterator[Metric]:
        stats, counts = status.stats, status.counts
        used = 1.0 - stats.blocks_free / stats.blocks_total
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled.", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        yield self._gauge(
            "baton:prefix_cache_usage_perc",
            "Share of KV blocks that hold a cached prefix, in use or not, 0 to 1.",
            stats.blocks_cached / stats.blocks_total,
        )
        yield self._gauge(
            "baton:tokens_waiting", "Prompt tokens accepted and not yet computed.", stats.tokens_waiting
        )
        yield self._gauge(
            "baton:held_prefills", "Finished prefills with KV that is not acknowledged.", stats.held
        )
        yield self._gauge(
            "baton:reservations", "Reserved requests that wait for their KV.", stats.reservations
        )
        yield self._gauge(
            "baton:prefill_tokens_per_second", "Recent prefill speed.", stats.prefill_tokens_per_s
        )
        yield self._gauge("baton:step_seconds", "Mean of recent engine steps.", stats.step_seconds)
        if stats.experts is not None:
            yield from self._of_experts(stats.experts)
        if stats.offload:
            yield from self._of_offload(stats.offload)
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens that this worker prefilled.", counts.prompt_tokens
        )
        cached, fetched = counts.prompt_tokens_cached, counts.prompt_tokens_fetched
        yield self._by_label(
            "vllm:prompt_tokens_by_source",
            "Where the KV of the prompts that this worker prefilled comes from.",
            "source",
            {
                "local_compute": counts.prompt_tokens - cached - fetched,
                "local_cache_hit": cached,
                "external_kv_transfer": fetched,
            },
        )
        yield self._counter("vllm:generation_tokens", "Tokens sampled.", counts.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Requests that were preempted.", stats.preemptions)
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits
        )
        yield self._by_label(
            "baton:prefix_fetched_tokens",
            "Prompt tokens with KV from the prefix caches of other workers, by the tier that had it there.",
            "tier",
            dict(zip(_TIERS, counts.prefix_fetched_tokens, strict=True)),
        )
        yield self._counter(
            "baton:prefix_fetched_bytes",
            "KV from the prefix caches of other workers.",
            counts.prefix_fetched_bytes,
        )
        yield self._by_label(
            "vllm:request_success",
            "Requests that ended with their last token on this worker.",
            "finished_reason",
            {"stop": counts.finished_stop, "length": counts.finished_length},
        )

    def _of_experts(self, stats: ExpertStats) -> Iterator[Metric]:
        yield self._by_label(
            "baton:expert_tokens",
            "Tokens that an expert computed, in all layers together.",
            "expert",
            {str(expert): tokens for expert, tokens in enumerate(stats.tokens)},
        )
        yield self._gauge(
            "baton:expert_imbalance",
            "Tokens of a layer's busiest expert, to the mean of its experts: recent steps, mean of layers.",
            stats.imbalance,
        )
        yield self._gauge(
            "baton:experts_used",
            "Experts with tokens in a layer of a step; mean of recent ones.",
            stats.used,
        )

    def _of_offload(self, tiers: Sequence[OffloadStats]) -> Iterator[Metric]:
        gauges: tuple[tuple[str, str, dict[Tier, float]], ...] = (
            (
                "baton:offload_usage_perc",
                "Share of the places for KV blocks below the device that hold one, 0 to 1.",
                {stats.tier: stats.blocks_used / stats.blocks_total for stats in tiers},
            ),
            (
                "baton:offload_tokens_per_second",
                "Recent speed of copies back to the device.",
                {stats.tier: stats.tokens_per_s for stats in tiers},
            ),
        )
        for name, text, values in gauges:
            family = GaugeMetricFamily(name, text, labels=(*self._labels, "tier"))
            for tier, value in values.items():
                family.add_metric([*self._labels.values(), _TIERS[tier]], value)
            yield family
        for name, text, field in (
            ("saved_blocks", "KV blocks copied to a tier below the device.", "saved"),
            ("loaded_tokens", "Prompt tokens with KV copied back to the device.", "loaded_tokens"),
            ("dropped_blocks", "Copies to a tier that came too late: the block was needed.", "dropped"),
            ("failed_blocks", "Copies to a tier that failed, as on a full disk.", "failed"),
            ("damaged_blocks", "KV blocks with a wrong checksum. No request used them.", "damaged"),
        ):
            values = {_TIERS[stats.tier]: getattr(stats, field) for stats in tiers}
            yield self._by_label(f"baton:offload_{name}", text, "tier", values)

    def _of_transfer(self, stats: TransferStats) -> Iterator[Metric]:
        yield self._gauge("baton:kv_transfers_open", "Transfers under way.", stats.transfers_open)
        yield self._gauge(
            "baton:kv_fetches_waiting",
            "FETCHes for a prefill id that is not known yet.",
            stats.fetches_waiting,
        )
        yield self._gauge("baton:kv_sessions", "Peers with open lanes.", stats.sessions)
        yield self._gauge("baton:kv_lanes", "Open lanes.", stats.lanes)
        readers = GaugeMetricFamily(
            "baton:kv_readers", "Peers that fetch KV from here.", labels=(*self._labels, "transport")
        )
        used = Counter(transport.partition(":")[0] for transport in stats.transports.values())
        for transport in _TRANSPORTS:
            readers.add_metric([*self._labels.values(), transport], used[transport])
        yield readers
        yield self._gauge("baton:kv_arena_slots", "Slots of each staging arena.", stats.slots)
        arenas = GaugeMetricFamily(
            "baton:kv_arena_slots_free", "Free slots of a staging arena.", labels=(*self._labels, "direction")
        )
        arenas.add_metric([*self._labels.values(), "send"], stats.sender_slots_free)
        arenas.add_metric([*self._labels.values(), "receive"], stats.receiver_slots_free)
        yield arenas
        moved = {"send": stats.bytes_sent, "receive": stats.bytes_received}
        yield self._by_label("baton:kv_bytes", "KV sent, or received and verified.", "direction", moved)
        frames = {"send": stats.frames_sent, "receive": stats.frames_received}
        yield self._by_label("baton:kv_frames", "KV frames.", "direction", frames)
        yield self._counter(
            "baton:kv_late_frames", "Frames that arrived for a transfer that had ended.", stats.late_frames
        )
        for name, text, label, values, known in (
            ("baton:kv_transfers", "Transfers ended.", "reason", stats.transfers, _TRANSFERS),
            ("baton:kv_checksum_failures", "Bad frames.", "kind", stats.checksum_failures, _CHECKSUMS),
            ("baton:kv_refused", "Peers and frames refused.", "reason", stats.refused, REFUSED),
            (
                "baton:deadlines_expired",
                "Deadlines that expired.",
                "deadline",
                stats.deadlines,
                _DEADLINES,
            ),
        ):
            yield self._by_label(name, text, label, dict.fromkeys(known, 0) | values)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=tuple(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by_label(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*self._labels, label))
        for value, count in values.items():
            family.add_metric([*self._labels.values(), value], count)
        return family
