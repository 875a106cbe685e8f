"""The shell scripts of examples/ start vLLM servers and workers. On GPUs, or on CPUs as here."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from baton.bench.lab.harness.cluster import free_port
from baton.vllm_worker.transfer_process import Settings
from tests.docs.test_commands import wrong
from tests.pages import ROOT
from tests.within import WITHIN

pytestmark = pytest.mark.all

EXAMPLES = ROOT / "examples"
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PROXY = '''
"""Does what vLLM's example proxy for NixlConnector does."""
import http.server, json, sys, urllib.request

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                 "remote_block_ids": None, "remote_host": None, "remote_port": None}
        first = self.post("--prefiller-port", body | {"max_tokens": 1, "kv_transfer_params": asked})
        params = first["kv_transfer_params"]
        answer = self.post("--decoder-port", body | {"kv_transfer_params": params}) | {"params": params}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def post(self, port, body):
        url = f"http://127.0.0.1:{options[port]}{self.path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))

http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
'''


@pytest.mark.parametrize("name", ["vllm_proxy.sh", "vllm_router.sh"])
def test_scripts_can_be_parsed(name: str) -> None:
    subprocess.run(["bash", "-n", EXAMPLES / name], check=True)
    text = (EXAMPLES / name).read_text().replace('"${options[@]}"', "--dtype bfloat16")
    for line in re.findall(r"^(?:\S+=\S+ )?(baton .*?)(?: &)?$", text, re.M):
        assert wrong(shlex.split(line)) is None


def transfer_configs(text: str) -> list[dict[str, Any]]:
    plain = re.sub(r"'\"\$3\"'", "kv_producer", text)
    return [json.loads(found) for found in re.findall(r"--kv-transfer-config '(\{.*?\})'", plain, re.S)]


@pytest.mark.parametrize("path", ["examples/vllm_proxy.sh", "docs/quickstart-gpu.md"])
def test_servers_get_a_connector_that_exists(path: str) -> None:
    configs = transfer_configs((ROOT / path).read_text())
    assert configs
    for config in configs:
        module = Path(*config["kv_connector_module_path"].split(".")).with_suffix(".py")
        assert f"class {config['kv_connector']}(" in (ROOT / module).read_text()
        Settings(**config.get("kv_connector_extra_config", {}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(symbols), hidden_size=128, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def port() -> int:
    """The servers take those above, by 100 and 200."""
    return free_port()


@pytest.fixture
def running(model: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    (model / "proxy.py").write_text(PROXY)
    serve = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--dtype=float32",
        "--enforce-eager",
        "--model",
    ]
    environment = {
        "SERVE": shlex.join(map(str, serve)), "PYTHON": str(PYTHON), "HOME": str(model), "PORT": str(port),
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    script = subprocess.Popen(
        ["bash", EXAMPLES / "vllm_proxy.sh", model, model / "proxy.py"],
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        yield script
    finally:
        os.killpg(script.pid, signal.SIGTERM)
        script.wait(WITHIN)


@pytest.mark.long
def test_a_proxy_for_nixl_connector(running: subprocess.Popen[bytes], model: Path, port: int) -> None:
    """The decode server computes the same prompt alone, too: it gives the same text."""
    body = {"model": str(model), "prompt": "one two three " * 30, "max_tokens": 16, "temperature": 0}
    url = "http://127.0.0.1:{}/v1/completions"

    def text(port_of: int) -> tuple[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url.format(port_of), json.dumps(body).encode(), headers)
        answer = json.load(urllib.request.urlopen(request))
        return answer["choices"][0]["text"], answer.get("params")

    while True:
        assert running.poll() is None
        try:
            found, params = text(port)
            break
        except URLError:
            time.sleep(0.2)
    assert params["do_remote_prefill"] is True
    assert (found, None) == text(port + 200)
