"""The engine process of a worker with vLLM. Its service runs `python -m baton.vllm_worker.engine_process`.

    service process ── messages ── this process (asyncio, AsyncLLM) ── vLLM's EngineCore with the connector
           └── transfer process ◀── arenas, heartbeat, which this process gives to the connector ──┘

1. Make the link to the connector, then vLLM's engine, in a thread. The connector attaches meanwhile.
2. Tell the service that the engine is ready. The service starts the transfer process.
3. Give messages of the service and of the connector to `Roles`, which calls vLLM, until Stop and Exit.

The connector shows by the heartbeat that vLLM computes, and this process that it is idle. If vLLM's process
ends, this one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop

from baton.content import content_root, vocabulary_fingerprint
from baton.engine import EngineConfig, EngineRequest, SamplingParams
from baton.kv_transfer import Heartbeat
from baton.kv_transfer.channel import ChannelClosed
from baton.vllm_worker.attachment import Attach, ConnectorLink
from baton.vllm_worker.options import command_line
from baton.vllm_worker.roles import EngineGone, Roles
from baton.vllm_worker.sampling import sampling
from baton.worker import messages
from baton.worker.engine_process.attempts import Attempts
from baton.worker.engine_process.start import EXIT_START_FAILED, EngineProcessConfig, start
from baton.worker.ipc import ServiceLink
from baton.worker.messages import Code, EngineReady, FromEngine

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

TICK = 0.25
"""Seconds between two signs of life."""
_EXIT_VLLM_GONE = 1


def run(config: EngineProcessConfig) -> int:
    gc.enable()
    _environment(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(EngineProcess(config).run())


def _environment(config: EngineProcessConfig) -> None:
    """Settings that vLLM has no options for. What the user has set wins."""
    threads = config.engine.num_threads
    settings = {
        "VLLM_CONFIGURE_LOGGING": "0",  # its lines look like all others
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # as `first_token` needs
        "VLLM_PROCESS_NAME_PREFIX": f"{config.title}: {config.name}",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, as Baton's own engine
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers share the CPUs
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


class EngineProcess:
    """Made and used in the event loop's thread."""

    def __init__(self, config: EngineProcessConfig) -> None:
        self._config = config
        self._link = ServiceLink(config.address)
        self._attempts = Attempts(self._send)
        self._heartbeat = Heartbeat(config.heartbeat_fd)
        self._connector = ConnectorLink([config.arenas], config.heartbeat_fd)
        # vLLM's process dies with the thread that starts it, so this thread lives on.
        self._thread = ThreadPoolExecutor(1, "vllm")
        self._scheduled = False
        self._ended: asyncio.Future[int] | None = None
        self._roles: Roles | None = None

    async def run(self) -> int:
        """Returns the exit code."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        ticking = asyncio.create_task(self._tick())
        try:
            generator, ready = await self._start()
        except ValueError as error:
            self._link.send(messages.StartFailed(str(error)))
            self._link.close()
            return EXIT_START_FAILED
        self._roles = Roles(
            self._attempts,
            generator.generate,
            self._connector.send,
            self._heartbeat.set_step,
            self._soon,
            blocks=ready.num_blocks - 1,
            block_size=ready.block_size,
            max_model_len=ready.max_model_len,
            incarnation=self._config.incarnation,
        )
        self._send(ready)
        listening = asyncio.create_task(self._listen(self._roles))
        loop.add_reader(self._link.fileno(), self._receive)
        code = await self._ended
        loop.remove_reader(self._link.fileno())
        ticking.cancel()
        listening.cancel()
        if code == 0:
            await asyncio.to_thread(self._link.wait_for_exit)
            generator.llm.shutdown(timeout=0)
            self._connector.close()
            self._link.close()
        return code

    # ------------------------------------------------------------ start

    async def _start(self) -> tuple[_Generator, EngineReady]:
        """Raises ValueError if vLLM does not start."""
        engine = self._config.engine
        loop = asyncio.get_running_loop()
        self._send(messages.Progress("starting vLLM", 0.0))
        attaching = asyncio.create_task(self._connector.attached())
        try:
            llm = await loop.run_in_executor(self._thread, self._start_vllm)
        except ValueError:
            raise
        except Exception as error:
            log.exception("vLLM does not start")
            raise ValueError(f"--engine vllm: vLLM does not start: {error}; see the worker's log") from error
        attach = await attaching
        generator = _Generator(llm)
        self._send(messages.Progress("warming up vLLM", 0.8))
        await generator.warm_up()
        self._send(messages.Progress("reading the model's fingerprint", 0.9))
        ready = await asyncio.to_thread(_ready, engine, attach, llm)
        return generator, ready

    def _start_vllm(self) -> AsyncLLM:
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        device = self._config.engine.device
        if current_platform.device_type != device:
            raise ValueError(f"--device {device}: this vLLM computes on {current_platform.device_type}")
        method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        args = _engine_args(self._config, self._connector.path)
        vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        # On CPUs vLLM has just set "spawn", and each of its processes would import all again.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
        return AsyncLLM.from_vllm_config(
            vllm_config, stat_loggers=[self._stat_logger()], disable_log_stats=True
        )

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        process = self

        class StepLogger(StatLoggerBase):
            """vLLM calls it in the event loop after each step."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if (roles := process._roles) is not None:
                    roles.load.step(
                        scheduler_stats, iteration_stats, time.monotonic(), prefills=roles.prefills
                    )

            def log_engine_initialized(self) -> None:
                pass

        return StepLogger

    # ------------------------------------------------------------ messages

    def _send(self, message: FromEngine) -> None:
        self._link.send(message)
        self._soon()

    def _soon(self) -> None:
        """Flushes when the tasks that are ready now have run: all tokens of a step share a message."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        self._attempts.flush()
        if self._link.has_messages:  # a send may have taken the signal of their arrival
            self._receive()

    def _receive(self) -> None:
        assert self._roles is not None
        assert self._ended is not None
        for message in self._link.receive_all():
            match message:
                case messages.Stop():
                    self._attempts.fail_all(Code.DRAINING, "the worker shuts down")
                    self._link.send(messages.Stopped())
                    if not self._ended.done():
                        self._ended.set_result(0)
                    return
                case messages.AskStatus(question):
                    self._send(self._roles.status(question))
                case _:
                    self._roles.handle(message)
        self._soon()

    async def _listen(self, roles: Roles) -> None:
        """Takes the connector's messages, until vLLM's process ends."""
        assert self._ended is not None
        try:
            while True:
                for message in await self._connector.receive():
                    roles.heard(message)
                self._soon()
        except ChannelClosed:
            log.error("vLLM's process has ended")
            if not self._ended.done():
                self._ended.set_result(_EXIT_VLLM_GONE)

    async def _tick(self) -> None:
        """Shows that this process lives while vLLM has nothing to compute, or starts."""
        while True:
            if self._roles is None or not self._roles.busy:
                self._heartbeat.tick()
            await asyncio.sleep(TICK)


class _Generator:
    """Requests for vLLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm

    async def warm_up(self) -> None:
        """vLLM compiles some functions when they are first needed, for longer than a step may take."""
        for params in (
            SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1, temperature=0.0, ignore_eos=True),
            SamplingParams(
                max_tokens=2, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, ignore_eos=True
            ),
        ):
            request = EngineRequest(os.urandom(16), [0, 0], sampling=params)
            fields = sampling(request, only_first=False, scores_prompt=True)
            async for _ in self.generate(request, fields, 0):
                pass

    async def generate(
        self, request: EngineRequest, fields: dict[str, Any], priority: int
    ) -> AsyncIterator[Any]:
        """As `roles.Generate`."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        ids = [*request.prompt_ids, *request.output_ids]
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt.hex()
        try:
            if (structure := fields.pop("structured_outputs", None)) is not None:
                fields["structured_outputs"] = StructuredOutputsParams(**structure)
            params = VLLMSamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
            outputs = self.llm.generate(prompt, params, request.id.hex(), priority=priority)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error
        except EngineDeadError as error:
            raise EngineGone from error


def _engine_args(config: EngineProcessConfig, attach: str) -> AsyncEngineArgs:
    """Raises ValueError for options that vLLM does not know."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"--vllm-args: {message}")

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm"))
    defaults = [
        "--scheduling-policy", "priority", "--structured-outputs-config", json.dumps({"backend": "guidance"}),
    ]  # fmt: skip
    parsed = parser.parse_args([*defaults, *command_line(config.engine, config.engine_args)])
    args = AsyncEngineArgs.from_cli_args(parsed)
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="BatonConnector",
        kv_connector_module_path="baton.vllm_worker.connector",
        kv_role="kv_both",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"attach": attach},
    )
    args.logits_processors = [
        *(args.logits_processors or ()), "baton.vllm_worker.first_token:RepeatFirstToken",
    ]  # fmt: skip
    return args


def _ready(engine: EngineConfig, attach: Attach, llm: AsyncLLM) -> EngineReady:
    """Raises ValueError if the tokenizer cannot be read."""
    from baton.engine.loader import checkpoint_path, model_fingerprint, tokenizer_source
    from baton.engine.loader.tokenizer_json import vocabulary

    model = llm.model_config
    fingerprint = attach.model_fingerprint
    if engine.load_format == "auto":  # dummy weights are others than those of Baton's engine
        try:
            fingerprint = model_fingerprint(engine, model.max_model_len)
        except ValueError as error:
            log.info(
                "Baton's engine does not have this model, so that vLLM workers are a pool alone: %s", error
            )
    dtype = f"torch.{attach.layout.dtype}"
    return EngineReady(
        model_fingerprint=fingerprint,
        content_root=content_root(fingerprint, str(model.dtype), dtype),
        layout=attach.layout,
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        block_size=attach.block_size,
        num_blocks=attach.num_blocks,
        offload_blocks=0,
        vocabulary_fingerprint=vocabulary_fingerprint(
            vocabulary(tokenizer_source(engine, str(checkpoint_path(engine))))
        ),
    )


if __name__ == "__main__":
    start(EngineProcessConfig, run)
