"""The connector that vLLM loads: it gives vLLM's calls to `metadata` and `transfers`.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "BatonConnector",
        "kv_connector_module_path": "baton.vllm_worker.connector", "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute"}'

It takes and returns the same request parameters as vLLM's NixlConnector, so it works behind proxies that were
made for that one. vLLM makes two connectors in each server: one for its scheduler, one for the process with
the model.

In a worker of Baton the connector has `"kv_connector_extra_config": {"attach": PATH}` and policy "fail". The
worker has the transfer process (`attachment`), and a router draws the ids of prefills and decodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.v1.request import RequestStatus

from baton.kv_names import CHUNK_TOKENS
from baton.kv_names.cache_kinds import latent_head_dim
from baton.kv_transfer import TraceWriter, Transport
from baton.kv_transfer.endpoint.rank_copier import RankCopier
from baton.processes.children import die_with_parent
from baton.vllm_worker.attachment import Attach, WorkerLink
from baton.vllm_worker.caches import (
    Caches,
    Heads,
    caches_of,
    clear_rest,
    clear_states,
    keeps_states,
    pool_of,
    table_of,
)
from baton.vllm_worker.identity import fingerprint, secret
from baton.vllm_worker.metadata import (
    REJECTED,
    ConnectorScheduler,
    Costs,
    Encoded,
    StepMetadata,
)
from baton.vllm_worker.mixed_steps import NOT_ENCODED, MixedSteps
from baton.vllm_worker.patches import mend
from baton.vllm_worker.pins import Pins
from baton.vllm_worker.state_chunks import compute_as_decodes, least_chunk
from baton.vllm_worker.supported import check_config, check_groups
from baton.vllm_worker.transfer_process import Settings, TransferProcess
from baton.vllm_worker.transfers import Transfers
from baton.vllm_worker.version import check_version

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


_process_transfers: list[Transfers] = []
"""Those of this process, if it has the model. vLLM's scheduler has a connector of its own."""


@dataclass
class Reachable(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once: where its KV can be fetched, and its incarnation."""

    address: tuple[str, int]


@dataclass
class FirstTokens(KVConnectorWorkerMetadata):
    """What rank 0 tells the scheduler after each step. Other ranks tell nothing."""

    tokens: dict[str, int]
    """By request id. Of a prefix: as in `Transfers.take_first_tokens`."""
    step: int
    """The number of the step."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FirstTokens:
        raise AssertionError("only one rank has first tokens")


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ValueError for what is not supported."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "it names this connector"
        self._config, self._kv, self._transfer = vllm_config, kv_cache_config, transfer
        settings = _settings(transfer.kv_connector_extra_config)
        self._settings = settings.of_rank(vllm_config.parallel_config.data_parallel_index)
        check_config(vllm_config)
        if vllm_config.lora_config is not None and not self._settings.attach:
            raise ValueError(
                "BatonConnector cannot tell which adapter (LoRA) the other server of a proxy has: use `baton "
                "serve --engine vllm --lora-modules NAME=PATH`, or start vLLM without it"
            )
        self._groups = kv_cache_config.kv_cache_groups
        self._has_states = any(keeps_states(group.kv_cache_spec) for group in self._groups)
        check_groups(vllm_config, self._groups, attached=bool(self._settings.attach))
        if not self._settings.attach:  # else the worker has checked it
            check_version(
                untested=self._settings.untested,
                part="BatonConnector",
                remedy='add "untested": true to kv_connector_extra_config to try this one',
            )
        else:
            die_with_parent(os.getppid())  # in both processes: `kill -9` of the engine process ends vLLM
        mend("model", vllm_config)
        # A client expects the first token from the decode server, which computes the last position again.
        # Blocks behind a window are gone then, and states would have the position twice.
        recomputed = int(len(self._groups) > 1 and not self._settings.attach)
        # Blocks are used in turn for KV and for states, and bytes of one may be NaN as the other.
        clears = getattr(kv_cache_config, "needs_kv_cache_zeroing", self._has_states)
        self._scheduler = ConnectorScheduler(
            named=bool(self._settings.attach), recomputed=recomputed, clears=clears
        )
        settings, config = self._settings, vllm_config.scheduler_config
        usual = config.long_prefill_token_threshold
        most = config.max_num_batched_tokens if config.enable_chunked_prefill else 0
        graph = vllm_config.compilation_config.max_cudagraph_capture_size
        chunk = least_chunk(self._groups, vllm_config.cache_config.mamba_cache_mode)
        self._steps = MixedSteps(
            usual, most, settings.itl_target, settings.itl_target_steps, graph,
            0 if (drafts := vllm_config.speculative_config) is None else drafts.num_speculative_tokens,
            chunk,
        )  # fmt: skip
        self._encoded = NOT_ENCODED  # that the engine process knows
        # Requests of a router that begin with an output, until their first step.
        self._beginning: dict[str, Request] = {}
        self._prefixes: dict[str, Request] = {}  # that are fetched, until they have come
        self._transfers: Transfers | None = None  # of rank 0
        self._copier: RankCopier | None = None  # of each other rank
        self._metadata = StepMetadata()
        self._caches: Caches | None = None  # of this rank, in the process with the model
        self._layers: Mapping[str, int] = {}  # by name. A model may have layers without attention
        self._layers_written = 0
        self._first_tokens: dict[str, int] = {}  # as in the `StepMetadata` of the step
        self._process: TransferProcess | None = None
        self._pins: Pins | None = None  # in the scheduler

    # ------------------------------------------------------------ in the scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        for reachable in metadata.values():  # none in a worker of Baton
            assert isinstance(reachable, Reachable)
            self._scheduler.address = reachable.address

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._settings.attach:
            from baton.vllm_worker.scheduler import bound_steps

            bound_steps()
        self._pins = Pins(gpu_block_pool, [table_of(group.kv_cache_spec) for group in self._groups])

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        if self._settings.attach and "pin_id" in params:
            assert self._pins is not None, "vLLM binds its pool before there are requests"
            block_size = self._groups[0].kv_cache_spec.block_size
            hashes = [bytes.fromhex(x) for x in params["pinned"]]
            first = params["first_chunk"] * CHUNK_TOKENS // block_size
            found = self._pins.add(request.request_id, hashes, first)
            self._scheduler.pins(request.request_id, params, found, block_size)
            return
        if self._settings.attach and "chunks" in params:
            self._prefixes[request.request_id] = request
        if self._has_states and not self._settings.attach and params.get("do_remote_decode"):
            _leave_out_the_last(request)
        image_tokens = [feature.mm_position.length for feature in request.mm_features or ()]
        self._scheduler.expect(request.request_id, params, request.num_prompt_tokens, image_tokens)
        if self._settings.attach and "chunks" not in params:
            if "decode_id" in params or "first_token" in params:
                self._beginning[request.request_id] = request
            if "measures" in params:
                self._steps.measure(*params["measures"])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """KV has come for requests, and the token that follows their prompts. vLLM computes on from there.

        vLLM makes this output when it launches a step, and reads it when that step is over. With one rank the
        model is in this process, so the KV that came meanwhile counts, too: each step that a request does not
        wait is a step less to its second token."""
        meta = connector_output.kv_connector_worker_meta or FirstTokens({}, 0)
        assert isinstance(meta, FirstTokens)
        tokens, now = meta.tokens, time.monotonic()
        if _process_transfers:
            [transfers] = _process_transfers
            if came := transfers.injected():
                connector_output.finished_recving = {*(connector_output.finished_recving or ()), *came}
                tokens |= came
        for request_id, token in tokens.items():
            if (request := self._beginning.get(request_id)) is not None:
                _append_output(request, token)
            elif (request := self._prefixes.pop(request_id, None)) is not None:
                _end_behind(request, token)
        self._steps.over(meta.step, now)
        for request_id in connector_output.finished_sending or ():
            if self._pins is not None:
                self._pins.end(request_id)

    def bound_step(self, scheduler: Scheduler) -> None:
        """vLLM schedules a step now, and reads its bounds."""
        requests = [request for request in scheduler.requests.values() if not request.is_finished()]
        if (bounds := self._steps.bound(time.monotonic(), requests)) is not None:
            scheduler.max_num_scheduled_tokens = bounds.step
            scheduler.scheduler_config.long_prefill_token_threshold = bounds.prompt

    def get_finished_count(self) -> int:
        return 1  # rank 0 speaks for all

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id in self._beginning and not request.num_output_tokens:
            assert request.kv_transfer_params is not None
            if (token := request.kv_transfer_params.get("first_token")) is not None:  # sampled here
                _append_output(request, token)
        if self._pins is not None and request.request_id in self._pins:
            return None, False  # it is never computed
        count = self._scheduler.to_fetch(request.request_id, num_computed_tokens)
        if self._scheduler.waits(request.request_id, num_computed_tokens + count):
            return None, False  # vLLM asks again in each step, until the request is aborted
        # One whose prompt was computed elsewhere, or here before, goes on beside those of others.
        is_prompt = request.request_id not in self._beginning and request.request_id not in self._prefixes
        if is_prompt and not self._steps.may_begin:
            return None, False
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Of 0.32 on. vLLM clears the blocks of other groups, perhaps after their KV has come."""
        return self._kv.transfer_group_ids

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        scheduler, steps, counts = self._scheduler, self._steps, scheduler_output.num_scheduled_tokens
        for request_id in scheduler_output.preempted_req_ids or ():
            scheduler.preempted(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            if (request := self._beginning.pop(new.req_id, None)) is not None:
                scheduler.begins_with(new.req_id, request.output_token_ids[0])
            computed, count = new.num_computed_tokens, counts[new.req_id]
            steps.scheduled(new.req_id, computed, count)
            scheduler.scheduled(new.req_id, new.block_ids, computed, count, anew=True)
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i] or ()
            computed, count = cached.num_computed_tokens[i], counts[request_id]
            steps.scheduled(request_id, computed, count)
            scheduler.scheduled(
                request_id, blocks, computed, count, anew=request_id in cached.resumed_req_ids
            )
        for request_id, images in scheduler_output.scheduled_encoder_inputs.items():
            steps.encodes(scheduler.encodes(request_id, images))
        metadata = scheduler.take()
        metadata.number = steps.begins(time.monotonic())
        if self._settings.attach:  # else there is no router to be told
            metadata.told += map(Costs, steps.news())
            encoded = steps.encoder(scheduler.images, scheduler.image_tokens)
            if encoded != self._encoded:
                self._encoded = encoded
                metadata.told.append(Encoded(encoded))
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._pins is not None and request.request_id in self._pins:
            return True, None
        self._beginning.pop(request.request_id, None)
        self._prefixes.pop(request.request_id, None)
        match request.status:
            case RequestStatus.FINISHED_LENGTH_CAPPED:
                return self._scheduler.finished(request.request_id, request.output_token_ids[0])
            case RequestStatus.FINISHED_STOPPED:
                return self._scheduler.finished(request.request_id, None, "finished")
        return self._scheduler.finished(request.request_id, None)

    # ------------------------------------------------------------ in the process with the model

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, settings = self._config, self._settings
        shape, text = config.model_config, config.model_config.hf_text_config
        latent_rank = getattr(text, "kv_lora_rank", None)
        heads = Heads(
            shape.get_total_num_kv_heads(),
            latent_head_dim(latent_rank, latent_rank + text.qk_rope_head_dim) if latent_rank else 0,
            get_tensor_model_parallel_rank(),
            config.parallel_config.tensor_parallel_size,
        )
        num_blocks = self._kv.num_blocks
        found = caches_of(kv_caches, self._groups, num_blocks, heads)
        kv, self._layers, self._caches = found.kv, found.layers, found
        if self._has_states:
            compute_as_decodes(v2=config.use_v2_model_runner)
        model, vocabulary = fingerprint(config), config.model_config.get_vocab_size()
        if settings.attach:
            path = settings.attach
            if not config.use_v2_model_runner:
                from baton.vllm_worker.model_runner import let_requests_begin_with

                let_requests_begin_with(self._first_tokens, vocabulary)
        else:
            if kv.rank == 0:
                name = f"vllm {str(self._transfer.kv_role).removeprefix('kv_')} {os.getpid()}"
                self._process = TransferProcess(kv, settings, name, model, secret(settings.host))
            path = get_tp_group().broadcast_object(self._process and self._process.path)
        pool = pool_of(self._groups, num_blocks)
        link = WorkerLink.open(path, Attach(kv.rank, kv.layout, pool, model, kv.sums))
        arenas = link.arenas
        if kv.rank:
            [rank0] = arenas.ranks()
            self._copier = RankCopier(kv, rank0, *arenas.map(), exports=arenas.exports, adopts=arenas.adopts)
            return
        self._transfers = Transfers(
            kv,
            found.tables,
            Transport.inherited(arenas, TraceWriter(None, "")),
            link.heartbeat,
            timeout=settings.timeout,
            vocabulary=vocabulary,
            worker=link.channel if settings.attach else None,
        )
        _process_transfers.append(self._transfers)
        if config.lora_config is not None:
            from baton.vllm_worker.device_adapters import watch

            watch(self._transfers.adapter_moved)

    def get_handshake_metadata(self) -> Reachable | None:
        return None if self._process is None else Reachable(self._process.address)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """No rank waits: nothing of a preempted prefill is used, whatever is still copied.

        Model runner V1 calls this before it takes new requests."""
        self._first_tokens.clear()
        self._first_tokens |= kv_connector_metadata.first_tokens
        if self._transfers is not None:
            self._transfers.preempt(kv_connector_metadata.preempted)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._metadata, self._layers_written = connector_metadata, 0
        assert self._caches is not None
        for begun in connector_metadata.begun:
            clear_rest(self._caches, begun)
        for blocks in connector_metadata.stateless:
            clear_states(self._caches, blocks)
        if self._transfers is not None:
            self._transfers.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The step's fetches have begun with it. vLLM may call this after the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are scheduled when all of their KV has come."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._written(self._layers[layer_name])

    def _written(self, last: int) -> None:
        """All layers up to this one are written. vLLM does not call `save_kv_layer` for linear layers."""
        for layer in range(self._layers_written, last + 1):
            if self._transfers is not None:
                self._transfers.saved(layer)
            elif self._copier is not None and self._metadata.chunks:  # as rank 0 counts
                self._copier.layer_done(layer)
        self._layers_written = max(self._layers_written, last + 1)

    def wait_for_save(self) -> None:
        """Does not wait: blocks stay until they are sent. A step that one CUDA graph holds has called
        `save_kv_layer` for no layer: the layers of a short prompt leave together."""
        if self._metadata.chunks:
            self._written(max(self._layers.values()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return (set(), set()) if self._transfers is None else self._transfers.ended(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, in vLLM from 0.30 on. It also says which requests have no KV."""
        results = super().get_transfer_results(finished_req_ids)
        if self._transfers is not None:
            results.failed_recving |= self._transfers.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._transfers is None else self._transfers.take_failed_blocks()

    def build_connector_worker_meta(self) -> FirstTokens | None:
        if (transfers := self._transfers) is None:
            return None
        tokens = {} if transfers.asked else transfers.take_first_tokens()
        return FirstTokens(tokens, self._metadata.number)

    def shutdown(self) -> None:
        if self._transfers is not None:
            _process_transfers.remove(self._transfers)
            self._transfers.close()
            self._transfers = None
        if self._process is not None:
            self._process.close()
            self._process = None


def _leave_out_the_last(request: Request) -> None:
    """The prompt ends before its last token, which the decode server computes: states are sent as they are
    before it."""
    if request.num_prompt_tokens > 1 and request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:], request._all_token_ids[-1:]
        request.num_prompt_tokens -= 1


def _end_behind(request: Request, tokens: int) -> None:
    """A prefix has come as far as its source had it. The request ends with the next token, which vLLM
    computes."""
    assert request.prompt_token_ids is not None, "it is no request with embeddings"
    del request.prompt_token_ids[tokens + 1 :], request._all_token_ids[tokens + 1 :]
    request.num_prompt_tokens, request.num_computed_tokens = tokens + 1, tokens


def _append_output(request: Request, token: int) -> None:
    """The request, which has no output yet, has sampled this token elsewhere."""
    request.append_output_token_ids(token)
    if (structure := request.structured_output_request) is not None and not structure.grammar.accept_tokens(
        request.request_id, [token]
    ):
        request.stop_reason = REJECTED  # the grammar allows no token but EOS now


def _settings(extra: dict[str, Any]) -> Settings:
    known = {field.name for field in fields(Settings)}
    if unknown := extra.keys() - known:
        raise ValueError(
            f"kv_connector_extra_config: {', '.join(sorted(unknown))} is not known; "
            f"BatonConnector has {', '.join(sorted(known))}"
        )
    return Settings(**extra)
