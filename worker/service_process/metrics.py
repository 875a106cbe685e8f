"""The Prometheus metrics of a worker. Metrics that vLLM has keep vLLM's names; all others are `baton:*`.

The engine and transfer processes keep the counters and report them. A scrape converts their last reports to
metrics. Only the histograms are kept here.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.engine import EncoderStats, ExpertStats, MemoryStats, OffloadStats, SpeculationStats
from baton.kv_names import Tier
from baton.kv_transfer import TransferStats
from baton.kv_transfer.memory_reader import READERS, reader_of
from baton.rpc import worker_pb2 as pb
from baton.system.addresses import listening_socket
from baton.system.connections import Connections
from baton.worker import messages
from baton.worker.messages import EngineReady, EngineStatus
from baton.worker.stats import StoreStats

disable_created_metrics()  # each counter and histogram would get one more series

ANSWER_SECONDS = 5.0
"""For a client to send its request and to take the page."""
_MOST_CONNECTIONS = 256
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
    "hello", "secret", "encryption", "side", "self", "version", "model", "layout", "dtype",
    "limits", "transfer_id",
)  # fmt: skip
_DEADLINES = ("handshake", "fetch_wait", "hold", "pin", "unreachable", "progress", "peer_dead", "engine_dead")
_TRANSFERS = ("acked", "busy", "injected", "cancelled", "deadline", "finished", "gone", "integrity", "lost")
_TIERS = tuple(tier.name.lower() for tier in Tier)
_READERS = (kind for kind in map(reader_of, READERS) if kind)
_TRANSPORTS = sorted({"cuda_ipc", "shared_memory", "tcp"}.union(*(kind.transports for kind in _READERS)))
_SHARES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("vllm:request_queue_time_seconds", "Time from acceptance to the start of the prefill.", _SECONDS),
    ("vllm:request_prefill_time_seconds", "Time from the start of the prefill to the first token.", _SECONDS),
    (
        "baton:request_encode_seconds",
        "Time from the first question for an image of the prompt until its images were encoded. On an "
        "encoder: time from the acceptance of an image until it was encoded.",
        _SECONDS,
    ),
    (
        "vllm:request_decode_time_seconds",
        "Time from the end of KV injection to the last token.",
        _LONG_SECONDS,
    ),
    ("baton:kv_transfer_seconds", "Time from the first KV frame to the last.", _SECONDS),
    (
        "baton:kv_injection_seconds",
        "Time from the start of the first copy into the blocks to the end of the last.",
        _SECONDS,
    ),
    ("baton:kv_exposed_seconds", "Time from prefill's first token to the end of KV injection.", _SECONDS),
    ("baton:kv_fetch_seconds", "Time from FETCH to the end of KV injection.", _SECONDS),
    ("baton:kv_hidden_share", "1 - exposed / transfer seconds, for each transfer.", _SHARES),
    ("baton:handover_seconds", "Time from prefill's first token to decode's second.", _SECONDS),
)


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
        self._gauge = partial(self._family, GaugeMetricFamily)
        self._counter = partial(self._family, CounterMetricFamily)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._server: asyncio.Server | None = None
        self._connections = Connections("the port of metrics", _MOST_CONNECTIONS)
        self._histograms = {
            name: Histogram(name, text, (*self._labels,), registry=self.registry, buckets=buckets)
            for name, text, buckets in _HISTOGRAMS
        }
        for histogram in self._histograms.values():
            histogram.labels(**self._labels)  # exported from the start

    @property
    def _labels(self) -> dict[str, str]:
        return {"model_name": self._model_name, "role": self.role}

    async def listen(self, host: str, port: int, serves: Callable[[], bool]) -> int:
        """Starts the HTTP server. Returns the port. Raises OSError if the port is in use.

        /health has the status 200 if `serves` says so, and else 503. A kubelet can ask here, since it has no
        certificate for the gRPC port. An event loop that hangs gives no answer.
        """
        listening = listening_socket(host, port)
        self._server = await asyncio.start_server(partial(self._answer, serves), sock=listening)
        return listening.getsockname()[1]

    async def _answer(
        self, serves: Callable[[], bool], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answers /health, and any other request with the page. Then closes. An idle one is closed, too."""
        slot = self._connections.open(writer.get_extra_info("peername")[0], writer.transport.abort)
        assert slot is not None, "an idle one has ended"
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
        finally:
            slot.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def cache_config(self, engine: EngineReady, prefix_caching: bool) -> None:
        self._cache_config = {
            "block_size": str(engine.description.block_size),
            "num_gpu_blocks": str(engine.description.num_blocks),
            "cache_dtype": engine.layout.dtypes.kv,
            "enable_prefix_caching": str(prefix_caching),
        }
        if states := engine.layout.dtypes.states:
            self._cache_config["mamba_ssm_cache_dtype"] = states

    def report(self, message: messages.Report) -> None:
        """Of an attempt."""
        match message:
            case messages.Prefilled():
                self._observe("vllm:request_queue_time_seconds", message.began_at - message.queued_at)
                self._observe("vllm:request_prefill_time_seconds", message.token_at - message.began_at)
                if message.images_asked_at:
                    took = message.images_encoded_at - message.images_asked_at
                    self._observe("baton:request_encode_seconds", took)
            case messages.Encoded():
                self._observe("baton:request_encode_seconds", message.ended_at - message.began_at)
            case messages.KVInjected(_, stats):
                self._observe("baton:kv_transfer_seconds", stats.transfer_seconds)
                self._observe("baton:kv_injection_seconds", stats.injection_seconds)
                self._observe("baton:kv_exposed_seconds", stats.exposed_seconds)
                self._observe("baton:kv_fetch_seconds", stats.fetch_seconds)
                self._observe("baton:kv_hidden_share", stats.hidden_share)
            case messages.SecondToken(_, handover):
                self._observe("baton:handover_seconds", handover)
            case messages.Decoded():
                self._observe("vllm:request_decode_time_seconds", message.ended_at - message.joined_at)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(**self._labels).observe(value)

    def collect(self) -> Iterable[Metric]:
        info = self._labels | self._cache_config
        yield InfoMetricFamily("vllm:cache_config", "KV cache of the engine.", value=info)
        devices = self._tensor_parallel_size
        yield self._gauge("baton:tensor_parallel_size", "Devices that this worker spans.", devices)
        if self.engine_status is not None:
            yield from self._of_engine(self.engine_status)
        if self.transfer_stats is not None:
            yield from self._of_transfer(self.transfer_stats)

    # ------------------------------------------------------------ families

    def _of_engine(self, status: EngineStatus) -> Iterator[Metric]:
        stats, counts, gauge, counter = status.stats, status.counts, self._gauge, self._counter
        used = 1.0 - stats.blocks_free / stats.blocks_total
        cached = stats.blocks_cached / stats.blocks_total
        yield gauge("vllm:num_requests_running", "Requests in the running batch.", stats.requests_running)
        yield gauge(
            "vllm:num_requests_waiting", "Requests that wait to be scheduled.", stats.requests_waiting
        )
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        text = "Share of KV blocks that hold a cached prefix, in use or not, 0 to 1."
        yield gauge("baton:prefix_cache_usage_perc", text, cached)
        text = "Prompt tokens accepted and not yet computed."
        yield gauge("baton:tokens_waiting", text, stats.tokens_waiting)
        yield gauge(
            "baton:held_prefills", "Finished prefills with KV that is not acknowledged.", stats.held_prefills
        )
        yield gauge("baton:reservations", "Reserved requests that wait for their KV.", stats.reservations)
        yield gauge("baton:prefill_tokens_per_second", "Recent prefill speed.", stats.prefill_tokens_per_s)
        yield gauge("baton:step_seconds", "Mean of recent engine steps.", stats.step_seconds)
        if stats.experts is not None:
            yield from self._of_experts(stats.experts)
        if stats.offload:
            yield from self._of_offload(stats.offload)
        if stats.memory is not None:
            yield from self._of_memory(stats.memory)
        if stats.encoder is not None:
            yield from self._of_encoder(stats.encoder)
        if stats.speculation is not None:
            yield from self._of_drafts(stats.speculation)
        text = "Prompt tokens that this worker prefilled."
        sources = {
            "local_compute": counts.computed_prompt_tokens,
            "local_cache_hit": counts.prompt_tokens_cached,
            "external_kv_transfer": counts.prompt_tokens_fetched,
        }
        yield counter("vllm:prompt_tokens", text, sum(sources.values()))
        text = "Where the KV of the prompts that this worker prefilled comes from."
        yield counter("vllm:prompt_tokens_by_source", text, sources, "source")
        yield counter("vllm:generation_tokens", "Tokens sampled.", counts.generation_tokens)
        yield counter("vllm:num_preemptions", "Requests that were preempted.", stats.preemptions)
        text = "Prompt tokens looked up in the prefix cache."
        yield counter("vllm:prefix_cache_queries", text, stats.prefix_cache_queries)
        text = "Prompt tokens found in the prefix cache."
        yield counter("vllm:prefix_cache_hits", text, stats.prefix_cache_hits)
        by_tier = dict(zip(_TIERS, counts.fetched_by_tier, strict=True))
        text = "Prompt tokens with KV from the prefix caches of other workers, by the tier that had it there."
        yield counter("baton:prefix_fetched_tokens", text, by_tier, "tier")
        text = "KV from the prefix caches of other workers."
        yield counter("baton:prefix_fetched_bytes", text, counts.prefix_fetched_bytes)
        for name, text, value in (
            ("", "Parts of prompts that other workers compute, too.", counts.prompt_parts),
            ("_failed", "Of these, the ones that failed.", counts.prompt_parts_failed),
            ("_wait_seconds", "Time that steps waited for their KV.", counts.prompt_parts_waited),
        ):
            yield counter(f"baton:prompt_parts{name}", text, value)
        if status.store is not None:
            yield from self._of_store(status.told, status.store)
        text = "Requests that ended with their last token on this worker."
        ends = {"stop": counts.finished_stop, "length": counts.finished_length}
        yield counter("vllm:request_success", text, ends, "finished_reason")

    def _of_store(self, told: pb.WorkerStatus, stats: StoreStats) -> Iterator[Metric]:
        is_open = float(told.store == "open")
        yield self._gauge("baton:store_open", "Whether the shared store is connected.", is_open)
        text = "Recent speed of fetches from the shared store."
        yield self._gauge("baton:store_tokens_per_second", text, told.store_tokens_per_s)
        text = (
            "Chunks of 64 tokens that the shared store took, did not take, or returned wrong or not at all."
        )
        results = {"written": stats.written, "refused": stats.refused, "missed": stats.missed}
        yield self._counter("baton:store_chunks", text, results, "result")

    def _of_experts(self, stats: ExpertStats) -> Iterator[Metric]:
        tokens = {str(expert): tokens for expert, tokens in enumerate(stats.tokens)}
        text = "Tokens that an expert computed, in all layers together."
        yield self._counter("baton:expert_tokens", text, tokens, "expert")
        text = "Tokens of a layer's busiest expert, to the mean of its experts: recent steps, mean of layers."
        yield self._gauge("baton:expert_imbalance", text, stats.imbalance)
        text = "Experts with tokens in a layer of a step; mean of recent ones."
        yield self._gauge("baton:experts_used", text, stats.used)

    def _of_drafts(self, stats: SpeculationStats) -> Iterator[Metric]:
        counter = self._counter
        yield counter("vllm:spec_decode_num_drafts", "Steps of requests that had drafts.", stats.steps)
        yield counter("vllm:spec_decode_num_draft_tokens", "Drafts of tokens.", stats.drafts)
        text = "Drafts that became tokens."
        yield counter("vllm:spec_decode_num_accepted_tokens", text, stats.accepted)

    def _of_memory(self, stats: MemoryStats) -> Iterator[Metric]:
        shares = {
            "kv": stats.kv_memory_bytes,
            "states": stats.state_memory_bytes,
            "windows": stats.window_memory_bytes,
            "free": stats.free_bytes,
        }
        text = "Memory of a device that KV shares with states or window blocks, by what has it."
        yield self._gauge("baton:elastic_memory_bytes", text, shares, "kind")
        text = "Memory that went from KV to states or window blocks, or back."
        yield self._counter("baton:elastic_memory_moved_bytes", text, stats.moved_bytes)
        text = "Time in which it went."
        yield self._counter("baton:elastic_memory_move_seconds", text, stats.moving_seconds)

    def _of_encoder(self, stats: EncoderStats) -> Iterator[Metric]:
        gauge, counter = self._gauge, self._counter
        text = "Images that prompts wait for, and that are not encoded."
        yield gauge("baton:images_waiting", text, stats.images_waiting)
        yield counter("baton:images_encoded", "Images that were encoded.", stats.images_encoded)
        yield counter("baton:image_tokens_encoded", "Their tokens.", stats.tokens)
        yield counter("baton:encode_seconds", "Time in which images were encoded.", stats.seconds)
        text = "Images that were not encoded, since their embeddings were kept."
        yield counter("baton:encoder_cache_hits", text, stats.hits)
        yield gauge("baton:encoder_cache_bytes", "Embeddings that are kept.", stats.kept_bytes)

    def _of_offload(self, tiers: Sequence[OffloadStats]) -> Iterator[Metric]:
        used = {_TIERS[stats.tier]: stats.blocks_used / max(1, stats.blocks_total) for stats in tiers}
        text = "Share of the places for KV blocks below the device that hold one, 0 to 1."
        yield self._gauge("baton:offload_usage_perc", text, used, "tier")
        speeds = {_TIERS[stats.tier]: stats.tokens_per_s for stats in tiers}
        text = "Recent speed of copies back to the device."
        yield self._gauge("baton:offload_tokens_per_second", text, speeds, "tier")
        for name, text, field in (
            ("saved_blocks", "KV blocks copied to a tier below the device.", "saved"),
            ("loaded_tokens", "Prompt tokens with KV copied back to the device.", "loaded_tokens"),
            ("dropped_blocks", "Copies to a tier that came too late: the block was needed.", "dropped"),
            ("failed_blocks", "Copies to a tier that failed, as on a full disk.", "failed"),
            ("damaged_blocks", "KV blocks with a wrong checksum. No request used them.", "damaged"),
        ):
            values = {_TIERS[stats.tier]: getattr(stats, field) for stats in tiers}
            yield self._counter(f"baton:offload_{name}", text, values, "tier")

    def _of_transfer(self, stats: TransferStats) -> Iterator[Metric]:
        gauge, counter = self._gauge, self._counter
        yield gauge("baton:kv_transfers_open", "Transfers under way.", stats.transfers_open)
        text = "FETCHes for a prefill id that is not known yet."
        yield gauge("baton:kv_fetches_waiting", text, stats.fetches_waiting)
        yield gauge("baton:kv_sessions", "Peers with open lanes.", stats.sessions)
        yield gauge("baton:kv_lanes", "Open lanes.", stats.lanes)
        used = Counter(transport.partition(":")[0] for transport in stats.transports.values())
        readers = {transport: used[transport] for transport in _TRANSPORTS}
        yield gauge("baton:kv_readers", "Peers that fetch KV from here.", readers, "transport")
        yield gauge("baton:kv_arena_slots", "Slots of each staging arena.", stats.slots)
        free = {"send": stats.sender_slots_free, "receive": stats.receiver_slots_free}
        yield gauge("baton:kv_arena_slots_free", "Free slots of a staging arena.", free, "direction")
        moved = {"send": stats.bytes_sent, "receive": stats.bytes_received}
        yield counter("baton:kv_bytes", "KV sent, or received and verified.", moved, "direction")
        frames = {"send": stats.frames_sent, "receive": stats.frames_received}
        yield counter("baton:kv_frames", "KV frames.", frames, "direction")
        text = "Frames that arrived for a transfer that had ended."
        yield counter("baton:kv_late_frames", text, stats.late_frames)
        for name, text, label, values, known in (
            ("kv_transfers", "Transfers ended.", "reason", stats.transfers, _TRANSFERS),
            ("kv_checksum_failures", "Bad frames.", "kind", stats.checksum_failures, _CHECKSUMS),
            ("kv_refused", "Peers and frames refused.", "reason", stats.refused, REFUSED),
            ("deadlines_expired", "Deadlines that expired.", "deadline", stats.deadlines, _DEADLINES),
        ):
            yield counter(f"baton:{name}", text, dict.fromkeys(known, 0) | values, label)

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        value: float | Mapping[str, float],
        by: str = "",
    ) -> Metric:
        """`value`: that of the metric, or for each value of the label `by`."""
        labels, values = self._labels, value if isinstance(value, Mapping) else {"": value}
        family = kind(name, text, labels=(*labels, by) if by else (*labels,))
        for label, number in values.items():
            family.add_metric([*labels.values(), label] if by else [*labels.values()], number)
        return family
