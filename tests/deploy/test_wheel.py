"""The wheel has all that a router and a load test need beside Python files. It serves where pip puts it."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from baton.system.addresses import free_port
from tests.within import WITHIN

pytestmark = pytest.mark.all

ROOT = Path(__file__).parents[2]
USE = """
from pathlib import Path
from aiohttp import web
from baton.bench.load.report import page
from baton.bench.load.traffic.trace import SAMPLE_TRACE
from baton.cluster.cli import app
from baton.cluster.tools.sizing import MODELS
from baton.router.endpoints import pages
web.Application().add_routes(pages.routes(("home", "chat", "docs", "dashboard")))
assert "uPlot" in page.page([{"parameters": {}, "started": "", "results": []}], ["run"])
assert MODELS and SAMPLE_TRACE.exists()
print(Path(pages.__file__).parents[4])
"""


def installed(tmp_path: Path) -> Path:
    """Where pip has installed the wheel of this tree, without its dependencies."""
    (tmp_path / "build.cfg").write_text(
        f"[build]\nbuild_base={tmp_path}/b\n[egg_info]\negg_base={tmp_path}\n"
    )
    pip = [sys.executable, "-m", "pip"]
    command = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(tmp_path), str(ROOT)]
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(tmp_path / "build.cfg")}
    subprocess.run(command, check=True, env=environment)
    [wheel] = tmp_path.glob("*.whl")
    target = tmp_path / "installed"
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-compile", "--target", str(target), str(wheel)],
        check=True,
    )
    return target


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    target = installed(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    printed = subprocess.run(
        [sys.executable, "-P", "-c", USE], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert printed.returncode == 0, printed.stderr
    assert Path(printed.stdout.strip()) == target
    assert not (target / "baton" / "bench" / "lab").exists(), "users have no use for it"


@pytest.mark.long
def test_the_installed_wheel_serves(tmp_path: Path) -> None:
    target, port = installed(tmp_path), free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    environment["PYTHONPATH"] = str(target)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    flags = [
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--advanced.num-blocks",
        "200",
        "--advanced.num-threads",
        "1",
    ]
    with subprocess.Popen(
        [sys.executable, "-P", target / "bin" / "baton", "serve", *flags],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as serve:
        assert serve.stdout is not None
        try:
            for line in serve.stdout:
                if "Stop:" in line:  # the last line of what it prints when it is ready
                    break
            body = json.dumps({"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}).encode()
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=WITHIN) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            compiled = {path.name.partition(".")[0] for path in (target / "baton").rglob("*.pyc")}
            assert compiled >= {"http_server", "step_loop"}, "roles have imported what pip installed"
        finally:
            serve.send_signal(signal.SIGINT)
            serve.communicate(timeout=WITHIN)
    assert serve.returncode == 0
