"""The scripts of examples/ and the commands of docs/quickstart.md print what they promise."""

from __future__ import annotations

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

from baton.bench.harness.cluster import free_port
from baton.cluster import model
from baton.engine import EngineConfig, EngineRequest, SamplingParams, build_engine
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from tests.pages import ROOT, Step, typed
from tests.within import WITHIN

from .machine import Machine
from .serve import Serve

EXAMPLES = ROOT / "examples"
QUESTION, ANSWER = "What is the capital of Japan?", "The capital of Japan is Tokyo."
PROMPT, COMPLETION = "1, 2, 3, 4, 5,", " 6, 7, 8"
MIN_MARGIN = 0.5
"""Between the logits of the best two tokens. Products of 16 bits change them by up to 0.2, as CPUs differ."""


@pytest.fixture(scope="module")
def grpc_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(grpc_address: str) -> Iterator[Serve]:
    """As the pages start it: in the default type, which `server` of the other tests has not."""
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


def main_of(script: str) -> Any:
    return runpy.run_path(str(EXAMPLES / script))["main"]


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("chat_stream.py", f"{ANSWER}\n"),
        ("structured_output.py", "'country': 'France'"),
    ],
)
def test_an_example(server: Serve, capsys: pytest.CaptureFixture[str], script: str, printed: str) -> None:
    main_of(script)(server.url)
    assert printed in capsys.readouterr().out


def test_the_grpc_example(server: Serve, grpc_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(main_of("grpc_stream.py")(grpc_address))
    assert capsys.readouterr().out == f"{ANSWER}\n8 tokens\n"


def test_the_embedded_model_as_a_directory(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    """`embedded_model.py` writes it for vLLM. Baton's engine answers with it as with the file."""
    main_of("embedded_model.py")(tmp_path, model.embedded_path())
    tokenizer, file = load_tokenizer(str(tmp_path)), tokenizer
    question = [{"role": "user", "content": QUESTION}]
    chat = tokenizer.chat_template.render(question)
    assert chat == file.chat_template.render(question)
    assert tokenizer.encode(chat) == file.encode(chat)
    engine = build_engine(EngineConfig(model=str(tmp_path), num_blocks=16, max_model_len=256, num_threads=1))
    params = SamplingParams(temperature=0, max_tokens=20)
    engine.add(EngineRequest(bytes(16), tokenizer.encode(chat), [], params))
    outputs = []
    while engine.loop.has_work:
        outputs += engine.loop.step().outputs
    engine.close()
    assert tokenizer.decode([output.token for output in outputs[:-1]]) == ANSWER
    assert outputs[-1].finish_reason == "stop"


def test_every_example_is_run() -> None:
    text = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in text] == []


@pytest.mark.parametrize("quantization", ["auto", "none"], ids=["packed where the CPU can", "bfloat16"])
def test_the_first_answers_are_far_from_a_tie(tokenizer: ModelTokenizer, quantization: str) -> None:
    """Rounding may turn a near tie into another answer, which goes on for thousands of tokens."""
    path = model.resolve(None).location
    chat = tokenizer.chat_template.render([{"role": "user", "content": QUESTION}])
    engine = build_engine(
        EngineConfig(model=path, num_blocks=16, max_model_len=256, num_threads=1, quantization=quantization)
    )
    for prompt, expected in ((chat, ANSWER), (PROMPT, COMPLETION)):
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
        engine.add(EngineRequest(bytes(16), tokenizer.encode(prompt), [], params))
        tokens, margins = [], []
        while engine.loop.has_work:
            for output in engine.loop.step().outputs:
                assert output.logprobs is not None
                best, second = output.logprobs.top_logprobs
                tokens.append(output.token)
                margins.append(round(best - second, 2))
        assert tokenizer.decode(tokens) == expected, margins
        assert min(margins) > MIN_MARGIN, margins
    engine.close()


@pytest.mark.parametrize("step", typed("docs/quickstart.md"), ids=lambda step: step.command.split("\n")[0])
def test_the_quick_start(server: Serve, step: Step) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", step.command.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")],
        env=server.machine.environment | {"PATH": path, "BATON_URL": server.url},
        capture_output=True,
        text=True,
        timeout=WITHIN,
    )
    assert done.returncode == 0, done.stderr
    assert step.missing(done.stdout) == [], done.stdout
