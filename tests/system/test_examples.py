"""The scripts of examples/ and the commands of docs/quickstart.md print what they promise."""

import asyncio
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.bench.lab.harness.cluster import free_port
from baton.cluster import model
from baton.engine import EngineConfig, EngineRequest, SamplingParams, build_engine
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from tests.pages import ROOT, Step, typed
from tests.within import WITHIN

from .machine import Machine
from .serve import Serve

pytestmark = pytest.mark.all

EXAMPLES = ROOT / "examples"
QUESTION, ANSWER = "What is the capital of Japan?", "The capital of Japan is Tokyo."
PROMPT, COMPLETION = "1, 2, 3, 4, 5,", " 6, 7, 8"
MIN_MARGIN = 0.5
"""Between the logits of the best two tokens. Products of 16 bits change them by up to 0.2, as CPUs differ."""


@pytest.fixture(scope="module")
def grpc_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def served(grpc_address: str) -> Iterator[Serve]:
    """As the pages start it: in the default type, which `server` has not."""
    machine = Machine()
    server = Serve(machine, "--dtype", "auto", "--grpc-port", grpc_address.rpartition(":")[2])
    try:
        server.until_ready()
        yield server
        server.stop(signal.SIGTERM)
    finally:
        server.kill()
        machine.remove()


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return load_tokenizer(model.resolve(None).location)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `embedded_model.py` writes for vLLM."""
    directory = tmp_path_factory.mktemp("embedded")
    main_of("embedded_model.py")(directory, model.embedded_path())
    return directory


def main_of(script: str) -> Any:
    return runpy.run_path(str(EXAMPLES / script))["main"]


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("chat_stream.py", f"{ANSWER}\n"),
        ("structured_output.py", "'country': 'France'"),
    ],
)
def test_an_example(served: Serve, capsys: pytest.CaptureFixture[str], script: str, printed: str) -> None:
    main_of(script)(served.url)
    assert printed in capsys.readouterr().out


def test_the_grpc_example(served: Serve, grpc_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(main_of("grpc_stream.py")(grpc_address))
    assert capsys.readouterr().out == f"{ANSWER}\n8 tokens\n"


def test_the_embedded_model_as_a_directory(tokenizer: ModelTokenizer, model_directory: Path) -> None:
    """The engine has the tokens of `test_the_first_answers_are_far_from_a_tie` with it."""
    directory, file = load_tokenizer(str(model_directory)), tokenizer
    question = [{"role": "user", "content": QUESTION}]
    chat = directory.chat_template.render(question)
    assert chat == file.chat_template.render(question)
    assert directory.encode(chat) == file.encode(chat)


def test_every_example_is_run() -> None:
    text = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in text] == []


@pytest.mark.long
@pytest.mark.parametrize("quantization", ["auto", "none"], ids=["packed where the CPU can", "bfloat16"])
def test_the_first_answers_are_far_from_a_tie(
    tokenizer: ModelTokenizer, model_directory: Path, quantization: str
) -> None:
    """Rounding may turn a near tie into another answer, which goes on for thousands of tokens.

    The file has blocks of 8 bits, and the directory the same weights in bfloat16.
    """
    path = model.resolve(None).location if quantization == "auto" else str(model_directory)
    chat = tokenizer.chat_template.render([{"role": "user", "content": QUESTION}])
    engine = build_engine(
        EngineConfig(model=path, num_blocks=16, max_model_len=256, num_threads=1, quantization=quantization)
    )
    for prompt, expected, reason in ((chat, ANSWER, "stop"), (PROMPT, COMPLETION, "length")):
        params = SamplingParams(temperature=0, max_tokens=20 if reason == "stop" else 8, logprobs=2)
        engine.add(EngineRequest(bytes(16), tokenizer.encode(prompt), [], params))
        outputs = []
        while engine.loop.has_work:
            outputs += engine.loop.step().outputs
        best_two = [output.logprobs.top_logprobs for output in outputs if output.logprobs is not None]
        margins = [round(best - second, 2) for best, second in best_two]
        tokens = [output.token for output in outputs]
        assert outputs[-1].finish_reason == reason
        assert tokenizer.decode(tokens[:-1] if reason == "stop" else tokens) == expected, margins
        assert len(margins) == len(tokens)
        assert min(margins) > MIN_MARGIN, margins
    engine.close()


@pytest.mark.parametrize("step", typed("docs/quickstart.md"), ids=lambda step: step.command.split("\n")[0])
def test_the_quick_start(served: Serve, step: Step) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", step.command.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}")],
        env=served.machine.environment | {"PATH": path, "BATON_URL": served.url},
        capture_output=True,
        text=True,
        timeout=WITHIN,
    )
    assert done.returncode == 0, done.stderr
    assert step.missing(done.stdout) == [], done.stdout
