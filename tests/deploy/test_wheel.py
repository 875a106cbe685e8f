"""The wheel has all that a router and a load test need beside Python files."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

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


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    (tmp_path / "build.cfg").write_text(
        f"[build]\nbuild_base={tmp_path}/b\n[egg_info]\negg_base={tmp_path}\n"
    )
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(tmp_path), str(ROOT)]
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(tmp_path / "build.cfg")}
    subprocess.run(command, check=True, env=environment)
    [wheel] = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    printed = subprocess.run(
        [sys.executable, "-P", "-c", USE], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert printed.returncode == 0, printed.stderr
    assert Path(printed.stdout.strip()) == installed
