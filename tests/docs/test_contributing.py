"""The recipes of CONTRIBUTING.md name all places, and `make help` all targets."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = "engine", "router", "proto", "worker", "prefill_worker", "decode_worker", "vllm_worker", "cluster"


def test_the_recipe_of_a_sampling_parameter_names_all_its_places() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    recipe = page.partition("## Add a sampling parameter")[2].partition("\n## ")[0]
    files = [path for part in PRODUCT for path in (ROOT / part).rglob("*.*")]
    sources = [path for path in files if path.suffix in (".py", ".proto")]
    places = [path for path in sources if re.search(r"\bmin_p\b", path.read_text())]
    assert len(places) > 10
    assert [str(path.relative_to(ROOT)) for path in places if path.name not in recipe] == []


def test_make_help_lists_all_targets() -> None:
    [phony] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {*phony.split()}
