"""`examples/vllm_proxy.sh` with the proxy of vLLM's source, which `VLLM_PROXY` names:
`tests/v1/kv_connector/nixl_integration/toy_proxy_server.py` there."""

import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from baton.bench.lab.harness.cluster import free_port
from tests.system.machine import until
from tests.within import WITHIN

from .engines import PYTHON, ROOT
from .served import START_S, STOP_S, Front, Reference, prompts_of, save_model

SERVER = "-m vllm.entrypoints.openai.api_server --dtype float32 --enforce-eager --served-model-name tiny"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif("VLLM_PROXY" not in os.environ, reason="VLLM_PROXY names no proxy of vLLM's source")
def test_a_proxy_that_was_made_for_nixl(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    front = Front(free_port())
    environment = {
        "PORT": str(front.port), "PYTHON": str(PYTHON), "SERVE": f"{PYTHON} {SERVER} --model",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with (tmp_path / "log").open("w") as out:
        script = subprocess.Popen(
            ["bash", ROOT / "examples" / "vllm_proxy.sh", model, os.environ["VLLM_PROXY"]],
            env=os.environ | environment, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def answers() -> bool | None:
        assert script.poll() is None, (tmp_path / "log").read_text()
        try:
            return urllib.request.urlopen(f"{front.url}/healthcheck", timeout=WITHIN).status == 200
        except urllib.error.URLError:
            return None

    try:
        until(answers, START_S, "ready")
        reference = Reference(model)
        for prompt in prompts_of([3, 128, 300], 3):
            right = reference.tokens(prompt, 12)
            assert front.ask(prompt=prompt, max_tokens=12)["token_ids"] == right
            assert [token for some in front.stream(prompt=prompt, max_tokens=12) for token in some] == right
        assert "its KV did not come" not in (tmp_path / "log").read_text()
    finally:
        script.terminate()
        script.wait(STOP_S)
