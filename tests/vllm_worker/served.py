"""A cluster of vLLM workers for tests, started as a user would, and what transformers says in its place."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from baton.bench.lab.harness.cluster import free_port, leaks_when_idle
from baton.bench.lab.harness.processes import spawn
from baton.bench.lab.harness.workers import metric
from baton.cluster.supervision.blueprint import Pool
from baton.cluster.supervision.calls import set_pool
from baton.kv_names import ImageSpan, prompt_hints
from baton.processes.tree import alive
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import connect
from baton.rpc.stubs import WorkerStub
from tests.device import DEVICE
from tests.forked import ForkedPopen, FreshPopen, forking
from tests.system.machine import titled, tree, until
from tests.vllm_worker import engines
from tests.vllm_worker.engines import PATHS, PYTHON, VISION
from tests.within import WITHIN

VOCABULARY = 300
START_S, STOP_S, CALL_S = 500.0, WITHIN, WITHIN
SECRET = "of the tests, and of no other cluster"


def save_model(directory: Path, kind: str = "Llama", **changes: Any) -> Path:
    """As that of `engines`, with a tokenizer."""
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 3072} | changes
    engines.save_model(directory, kind, **sizes, bos_token_id=None, eos_token_id=0)
    save_tokenizer(directory, sizes["vocab_size"])
    return directory


def save_tokenizer(directory: Path, vocabulary: int) -> None:
    """Writes one with so many tokens, all spelled in ASCII."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    texts = ["</s>", *map(chr, range(0x21, 0x7F)), "Ġ", "Ċ"]
    texts += [f"<{i}>" for i in range(len(texts), vocabulary)]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=[]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def prompts_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]


class Reference:
    """transformers, greedy."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # requests ignore it
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    @torch.inference_mode()
    def tokens(self, prompt: list[int], count: int) -> list[int]:
        generate: Any = self._model.generate
        ids = generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
        return ids[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def penalized(self, prompt: list[int], count: int, presence: float) -> list[int]:
        """Greedy, but tokens of the output are less likely."""
        tokens: list[int] = []
        for _ in range(count):
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            logits[tokens] -= presence
            tokens.append(int(logits.argmax()))
        return tokens

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()

    def text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


class Front:
    """A router as clients see it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def chat(self, **fields: Any) -> dict[str, Any]:
        """Asks for a greedy answer in a chat. Returns all that comes."""
        with self._post(fields, "chat/completions") as response:
            return json.load(response)

    def ask(self, **fields: Any) -> dict[str, Any]:
        """Asks for a greedy completion. Returns its choice."""
        with self._post(fields) as response:
            return json.load(response)["choices"][0]

    def stream(self, call: str = "completions", **fields: Any) -> Generator[list[int]]:
        """The tokens of each event."""
        with self._post({"stream": True} | fields, call) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    assert "error" not in event, event
                    yield event["choices"][0].get("token_ids") or []

    def _post(self, fields: dict[str, Any], call: str = "completions") -> Any:
        greedy = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{self.url}/v1/{call}",
            json.dumps(greedy | fields).encode(),
            {"content-type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=300)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Their reports, by role."""
        with urllib.request.urlopen(f"{self.url}/status", timeout=WITHIN) as response:
            found = json.load(response)["workers"]
        return {worker["role"]: worker for worker in found}

    def assert_whole(self) -> None:
        assert not (leaks := leaks_when_idle(self.url)), f"left when idle: {leaks}"


class VLLMCluster(Front):
    """`baton serve --engine vllm`, float32, on its way up until `until_ready` returns. If it is not `fresh`,
    vLLM takes less CPU time (`cheaper`). All KV is handed over, however long a step takes, since tests count
    tokens."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *flags: str,
        fresh: bool = False,
        sees: bool = False,
        measured: bool = False,
    ) -> None:
        """`sees`: vLLM can import what it needs for images. `measured`: workers measure steps at their start,
        as on GPUs."""
        assert PYTHON.exists(), "vLLM has an environment of its own: run `make venv-vllm`"
        assert not sees or VISION.exists(), "run `make venv-vllm`"
        super().__init__(free_port())
        self.model = model
        self.logs = directory / "logs"
        self._output = directory / "serve.log"
        # vLLM keeps files of one run for the next in its cache.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        paths = f"{PATHS}:{VISION}" if sees else PATHS
        environment |= {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "BATON_CLUSTER_SECRET": SECRET}
        environment |= {"FRESH_VLLM": "1"} if fresh else {}
        environment |= {"MEASURED_VLLM": "1"} if measured else {}
        environment |= {"CUDA_VISIBLE_DEVICES": "0,0"} if DEVICE == "cuda" else {}  # both workers on one GPU
        with self._output.open("wb") as out:
            self.process = (FreshPopen if fresh else ForkedPopen)(
                [
                    str(PYTHON), "-m", "baton.cluster.cli", "serve", "--engine", "vllm",
                    "--model", str(model),
                    "--served-model-name", "tiny", "--port", str(self.port), "--dtype", "float32",
                    "--log-dir", str(self.logs), "--advanced.num-threads", "1", "--advanced.no-overflow",
                    "--advanced.worker-wait", str(START_S),  # vLLM starts slowly on a busy machine
                    "--vllm-args", "--enforce-eager", *flags,
                ],
                cwd=directory, env=environment, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def output(self) -> str:
        return self._output.read_text()

    def until_ready(self) -> None:
        def ready() -> bool | None:
            assert self.process.poll() is None, self.output()
            return True if "Ready in" in self.output() else None

        until(ready, START_S, "ready")

    def until_restarted(self, role: str, times: int) -> None:
        text = f"{role}: ready after"
        until(lambda: True if self.output().count(text) >= times else None, START_S, text)

    def process_of(self, title: str) -> psutil.Process:
        """By its title: "decode 0 engine::EngineCore"."""
        found = titled(self.process.pid, f"baton {self.port}: {title}")
        assert found is not None, title
        return found

    def goes_on(
        self, right: list[int], title: str, end: Callable[[psutil.Process], None] = psutil.Process.kill,
        *, role: str = "", call: str = "completions", **fields: Any,
    ) -> None:  # fmt: skip
        """A stream has all its tokens though a process `end`s in the middle. Its worker restarts, or what
        `role` names. A decode process is killed again if the stream had ended before, on a busy machine."""
        role, lost = role or title[: title.index("0") + 1], False
        while not lost:
            restarts, tokens = self.output().count(f"{role}: ready after"), list[int]()
            before = metric(self.url, "baton:retries_total")
            for some in self.stream(call, max_tokens=len(right), **fields):
                if len(tokens) < 20 <= len(tokens) + len(some):
                    end(self.process_of(title))
                tokens += some
            assert tokens == right
            self.until_restarted(role, restarts + 1)
            lost = metric(self.url, "baton:retries_total") > before
            if end is not psutil.Process.kill or role.startswith("prefill"):
                break  # the stream goes on where it is
        self.assert_whole()

    def flip(self, role: str, pool: Pool) -> None:
        async def call() -> None:
            async with connect(self.workers()[role]["address"], SECRET.encode()) as channel:
                await set_pool(channel, pool, CALL_S)

        asyncio.run(call())

    def until_cached(
        self, role: str, prompt: list[int], tokens: int, images: Sequence[ImageSpan] = ()
    ) -> None:
        """Returns when the worker has told routers that it has cached these tokens of the prompt."""

        async def look() -> None:
            async with (
                connect(self.workers()[role]["address"], SECRET.encode()) as channel,
                asyncio.timeout(CALL_S),
            ):
                stub = WorkerStub(channel)
                described = await cast("Any", stub.Describe(pb.DescribeRequest()))
                missing = set(prompt_hints(prompt[:tokens], described.content_root, b"", images))
                call: Any = stub.Attach(None)
                hello = pb.RouterHello(router_id=os.urandom(16), cache=True)
                await call.write(pb.RouterMessage(hello=hello))
                while missing:
                    missing -= {*(await call.read()).cache.added}
                call.cancel()

        asyncio.run(look())

    def stop(self) -> None:
        """Asserts the end after SIGTERM. A worker that a test has killed may just be starting again."""
        processes = tree(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(STOP_S) == 0, self.output()
        assert self.output().endswith("Stopped.\n"), self.output()
        assert "did not end in time" not in self.output(), "no process of vLLM outlives its worker"
        assert not (living := [*filter(alive, processes)]), f"{living} outlive the cluster"
        unread = [log for log in self.logs.iterdir() if "unhandled exception" in log.read_text()]
        assert not unread, f"unhandled exceptions in {unread}"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def serving(
    model: Path, directory: Path, *flags: str, sees: bool = False, measured: bool = False
) -> Iterator[VLLMCluster]:
    """A cluster that is ready. Asserts how it ends."""
    served = VLLMCluster(model, directory, *flags, sees=sees, measured=measured)
    try:
        served.until_ready()
        yield served
        served.stop()
    finally:
        served.kill()


@contextlib.contextmanager
def joined(cluster: VLLMCluster, *flags: str) -> Iterator[tuple[Front, Front]]:
    """Starts Baton's engine beside the vLLM workers of a cluster. Yields a router of a pair in which it
    prefills, and one of a pair in which it decodes."""
    engine = ["--device", "cpu", "--dtype", "float32", "--advanced.num-threads", "1", *flags]
    fronts: list[Front] = []
    with contextlib.ExitStack() as roles:
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            worker = ["--port", str(port := free_port()), "--model", str(cluster.model), *engine]
            roles.enter_context(_started(role, *worker))
            theirs = cluster.workers()[other]["address"]
            fronts.append(
                roles.enter_context(routed(cluster, f"127.0.0.1:{port}", theirs, "--advanced.no-overflow"))
            )
        yield fronts[0], fronts[1]


@contextlib.contextmanager
def routed(cluster: VLLMCluster, *given: str) -> Iterator[Front]:
    """Starts another router. `given`: addresses of workers, and flags."""
    front = Front(free_port())
    flags = [word for each in given for word in ([each] if each.startswith("--") else ["--worker", each])]
    named = ["--served-model-name", "tiny", "--model", str(cluster.model)]
    with _started("router", "--port", str(front.port), *named, *flags):
        yield front


@contextlib.contextmanager
def _started(role: str, *flags: str) -> Iterator[None]:
    """A role that is ready, and ends afterwards."""
    with forking():
        process, told = spawn(role, *flags, environment=os.environ | {"BATON_CLUSTER_SECRET": SECRET})
        with told:
            assert "ready" in json.loads([*told][-1])
    try:
        yield
    finally:
        process.terminate()
        process.wait(STOP_S)
