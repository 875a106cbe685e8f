"""vLLM's `AsyncLLM` with Baton's connector: its start, and requests for it. The import takes seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.structured_output import backend_guidance

from baton import engine
from baton.engine.loader import checkpoint_path, model_fingerprint, tokenizer_source
from baton.engine.loader.tokenizer_json import eos_of_tokenizer, vocabulary
from baton.kv_names import content_root, vocabulary_fingerprint
from baton.rpc import worker_pb2 as pb
from baton.vllm_worker.adapters import Adapters
from baton.vllm_worker.attachment import Attach, Pool, events_address
from baton.vllm_worker.chosen_steps import PROMPT, Chosen, Kind, rounds
from baton.vllm_worker.engine import EngineGone
from baton.vllm_worker.grammars import Gate
from baton.vllm_worker.images import Images, settings_of
from baton.vllm_worker.options import command_line, computes_other_kv
from baton.vllm_worker.patches import mend
from baton.vllm_worker.sampling import after_reasoning, sampling
from baton.vllm_worker.supported import check_config
from baton.worker.engine_process.start import EngineProcessConfig
from baton.worker.messages import EngineReady

log = logging.getLogger(__name__)

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_WARM_UP = (
    engine.SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1, temperature=0.0, ignore_eos=True),
    engine.SamplingParams(max_tokens=2, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, ignore_eos=True),
)

MOST_ADAPTERS = 1024


class VLLM:
    def __init__(
        self, config: EngineProcessConfig, connector: str, on_step: Callable[[Any, Any], None]
    ) -> None:
        """Returns when vLLM has started. Raises ValueError for what the user can correct.

        Args:
            connector: the path of the socket to which the connector attaches.
            on_step: gets vLLM's statistics after each step, in the thread of the event loop.
        """
        self._engine = config.engine
        self._computes_other_kv = computes_other_kv(config.engine_args)
        if current_platform.device_type != config.engine.device:
            platform = current_platform.device_type
            raise ValueError(f"--device {config.engine.device}: this vLLM computes on {platform}")

        class StepLogger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                on_step(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        method = os.environ.get(_METHOD, "fork")
        vllm_config = engine_args_of(config, connector).create_engine_config(UsageContext.ENGINE_CONTEXT)
        check_config(vllm_config)
        replicas = vllm_config.parallel_config.data_parallel_size
        if replicas > 1 and not vllm_config.model_config.is_moe:
            raise ValueError(
                f"--data-parallel-size {replicas}: this model has no experts that workers could share; leave "
                "it out, and start more workers"
            )
        mend("engine", vllm_config)
        # On CPUs vLLM has just set "spawn", and each of its processes would import all again.
        os.environ[_METHOD] = method
        self._llm = AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[StepLogger], disable_log_stats=True)
        self.events = events_address(connector, vllm_config.parallel_config.data_parallel_rank)
        lora = vllm_config.lora_config
        most = 0 if lora is None else min(lora.max_cpu_loras or lora.max_loras, MOST_ADAPTERS)
        self.adapters = Adapters(self._add_adapter, self._remove_adapter, most)
        self._gate = Gate(vllm_config.model_config.get_vocab_size())
        checkpoint = checkpoint_path(config.engine)
        self._tokenizer = tokenizer_source(config.engine, str(checkpoint))
        settings = settings_of(self._llm, checkpoint)
        eos = vllm_config.model_config.try_get_generation_config().get("eos_token_id")
        more = *(eos if isinstance(eos, list) else [eos]), eos_of_tokenizer(self._tokenizer)
        self._eos_ids = {token for token in more if token is not None}
        drafts = vllm_config.speculative_config
        self._drafts = 0 if drafts is None else drafts.num_speculative_tokens
        self._images = None if settings is None else Images(self._llm, settings)
        # It would compile again what the gate has tried, and hold up the event loop meanwhile.
        backend_guidance.validate_guidance_grammar = lambda *_, **__: None

    async def warm_up(self, pool: Pool) -> None:
        """vLLM compiles some functions when they are first needed, for longer than a step may take. On a GPU,
        steps are measured, as those of Baton's engine. Raises ValueError if images have other tokens than in
        routers."""
        if self._images is not None:
            await self._images.check()
        for wanted in _WARM_UP:
            params = replace(wanted, min_p=0.0) if self._drafts else wanted  # vLLM has no min_p with drafts
            async for _ in self._rehearse([0, 0], params):
                pass
        if self._engine.device == "cuda":
            await self.measure(pool)

    async def measure(self, pool: Pool) -> None:
        """Measures what steps cost, unless vLLM computes each prompt in one step."""
        config = self._llm.vllm_config
        scheduler, graph = config.scheduler_config, config.compilation_config.max_cudagraph_capture_size
        if not scheduler.enable_chunked_prefill:
            return
        chosen = rounds(
            seats=scheduler.max_num_seqs,
            budget=scheduler.max_num_batched_tokens,
            graph=graph or 0,
            longest=self._llm.model_config.max_model_len,
            block=pool.block_size,
            room=pool.num_blocks // 2 * pool.block_size,
            drafts=self._drafts,
        )
        for _ in range(2):  # the first time vLLM may compile
            seed = os.urandom(8).hex()
            for number, (counts, requests) in enumerate(chosen):
                measures = number, counts
                async with contextlib.AsyncExitStack() as while_decoding:
                    if counts == "mixed":
                        beside = self._chosen(Chosen(-1, PROMPT, 1 << 16), measures, seed)
                        await anext(await while_decoding.enter_async_context(contextlib.aclosing(beside)))
                    await asyncio.gather(*(self._until_end(each, measures, seed) for each in requests))
            if chosen:
                await self._until_end(Chosen(-2, PROMPT, 1), (len(chosen), None), seed)

    async def _until_end(self, chosen: Chosen, measures: tuple[int, Kind | None], seed: str) -> None:
        async for _ in self._chosen(chosen, measures, seed):
            pass

    def _chosen(
        self, chosen: Chosen, measures: tuple[int, Kind | None], seed: str
    ) -> AsyncGenerator[Any, None]:
        """`measures`: of `MixedSteps.measure`. Tokens are random: equal ones would all have the same experts.
        Special ones, as for images, are at the ends of vocabularies."""
        number, tokens, answer = chosen
        vocabulary = self._llm.model_config.get_vocab_size()
        ids = Random(f"{seed} {number}").choices(range(vocabulary // 4, vocabulary // 2), k=tokens)
        most = self._llm.model_config.max_model_len - tokens
        wanted = engine.SamplingParams(max_tokens=min(answer, most), ignore_eos=True)
        return self._rehearse(ids, wanted, {"measures": measures})

    def _rehearse(
        self, ids: list[int], wanted: engine.SamplingParams, params: dict[str, Any] | None = None
    ) -> AsyncGenerator[Any, None]:
        """`params`: for the connector."""
        request = engine.EngineRequest(os.urandom(16), ids, sampling=wanted)
        fields = sampling(request, only_first=False, scores_prompt=True)
        if params is not None:
            fields["extra_args"] = {"kv_transfer_params": params}
        return self.generate(request, fields, 0)

    async def load_adapters(self) -> list[pb.Adapter]:
        """Loads those of --lora-modules. Raises ValueError."""
        loaded = list[pb.Adapter]()
        for name, given in self._engine.adapters.items():
            path = str(Path(given).absolute())
            try:
                fingerprint = await self.adapters.load(name, path)
            except ValueError as error:
                raise ValueError(f"--lora-modules {name}={given}: {error}") from error
            loaded.append(pb.Adapter(name=name, path=path, fingerprint=fingerprint))
        return loaded

    async def _add_adapter(self, fingerprint: bytes, number: int, path: str) -> None:
        try:
            await self._llm.add_lora(LoRARequest(fingerprint.hex(), number, path))
        except EngineDeadError as error:
            raise EngineGone from error
        except Exception as error:  # vLLM's errors have no common base
            raise ValueError(f"vLLM cannot load {path}: {error}") from error

    async def _remove_adapter(self, number: int) -> None:
        await self._llm.remove_lora(number)

    def ready(self, attach: Attach, adapters: list[pb.Adapter]) -> EngineReady:
        """Raises ValueError if the tokenizer cannot be read."""
        model, fingerprint = self._llm.model_config, attach.model_fingerprint
        # Dummy weights are not those of Baton's engine, either.
        if self._engine.load_format == "auto" and not self._computes_other_kv:
            try:
                fingerprint = model_fingerprint(self._engine, model.max_model_len)
            except ValueError as error:
                log.info("no worker with Baton's engine can be in this cluster: %s", error)
        states = "" if self._engine.state_dtype == "auto" else f" {self._engine.state_dtype}"
        described = pb.WorkerDescription(
            model_fingerprint=fingerprint,
            content_root=content_root(
                fingerprint, str(model.dtype), f"torch.{attach.layout.dtypes.kv}{states}"
            ),
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            block_size=attach.pool.block_size,
            num_blocks=attach.pool.num_blocks,
            vocabulary_fingerprint=vocabulary_fingerprint(vocabulary(self._tokenizer)),
            exchanges_prefixes=bool(attach.pool.tables) and self._engine.enable_prefix_caching,
            max_adapters=self.adapters.most,
            adapters=adapters,
        )
        images = None if self._images is None else self._images.settings
        return EngineReady(described, attach.layout, images, sums=attach.sums)

    async def generate(
        self, request: engine.EngineRequest, fields: dict[str, Any], priority: int
    ) -> AsyncGenerator[Any, None]:
        """Yields vLLM's RequestOutputs. `fields`: of SamplingParams. Raises EngineGone, and ValueError if the
        request is wrong."""
        ids = [*request.prompt_ids, *request.output_ids]
        try:
            prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids}
            if request.images:
                assert self._images is not None, "checked with the request"
                prompt = await self._images.prompt(ids, request.images)
            if request.cache_salt:
                prompt["cache_salt"] = request.cache_salt.hex()
            if (structure := fields.get("structured_outputs")) is not None:
                await self._gate.check(request.tenant, structure)
            if (reasoning := request.sampling.reasoning) is not None:
                structure = after_reasoning(structure, reasoning, self._eos_ids)
                await self._gate.check(request.tenant, structure)
            if structure is not None:
                fields["structured_outputs"] = StructuredOutputsParams(**structure)
            if self._engine.device == "cpu":
                # vLLM's worker dies when it rewinds the generator of a chunk, which torch cannot do on CPUs.
                fields.pop("seed", None)
            params = SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
            lora = None
            if request.adapter:
                adapter = self.adapters.of(request.adapter)
                lora = LoRARequest(request.adapter.hex(), adapter.number, adapter.path)
            # An attempt may come again before vLLM has aborted its request.
            name = f"{request.id.hex()}-{os.urandom(4).hex()}"
            outputs = self._llm.generate(prompt, params, name, lora_request=lora, priority=priority)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error
        except EngineDeadError as error:
            raise EngineGone from error

    async def pin(self, pin_id: bytes, params: dict[str, Any]) -> None:
        """Shows `kv_transfer_params` to the connector: the scheduler gets a request, which ends before it is
        computed. Raises EngineGone."""
        sampling, name = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}), pin_id.hex()
        try:
            await self._llm.add_request(name, {"type": "token", "prompt_token_ids": [0]}, sampling)
            await self._llm.abort(name)
        except EngineDeadError as error:
            raise EngineGone from error

    def close(self) -> None:
        self._gate.close()
        self._llm.shutdown(timeout=0)


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"--vllm-args: {message}")


def engine_args_of(config: EngineProcessConfig, connector: str) -> AsyncEngineArgs:
    """Raises ValueError for options that vLLM does not know."""
    # The first letters of a name could stand for an option of Baton.
    parser = AsyncEngineArgs.add_cli_args(_Parser(prog="vllm", allow_abbrev=False))
    # What users may change: the order of the queue, and a reader of grammars that is that of Baton's engine.
    defaults = (
        "--scheduling-policy", "priority", "--structured-outputs-config", json.dumps({"backend": "guidance"}),
    )  # fmt: skip
    parsed = parser.parse_args([*defaults, *command_line(config.engine, config.engine_args)])
    args = AsyncEngineArgs.from_cli_args(parsed)
    if args.dtype == "auto" and current_platform.is_cpu() and torch.cpu.get_capabilities().get("amx_tile"):
        log.info(
            "--dtype auto: float32, since other workers cannot read what vLLM caches for AMX in bfloat16"
        )
        args.dtype = "float32"
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="BatonConnector",
        kv_connector_module_path="baton.vllm_worker.connector",
        kv_role="kv_both",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={
            "attach": connector,
            "itl_target": config.engine.itl_target,
            "itl_target_steps": config.engine.itl_target_steps,
        },
    )
    if config.engine.enable_prefix_caching:
        args.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=events_address(connector),
            hwm=0,  # no limit, as the next: none is lost
            max_queue_size=0,
        )
    return args
