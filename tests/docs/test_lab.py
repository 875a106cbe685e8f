"""The pages of docs/lab are those of the run files."""

import json
from pathlib import Path

import pytest

from docs.lab.generate import BLOCK, LAB, render

PAGES = sorted(LAB.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_is_fresh(page: Path) -> None:
    assert render(page.read_text(), LAB / "runs") == page.read_text()


def test_a_page_shows_each_run() -> None:
    sections = {section for page in PAGES for section in BLOCK.findall(page.read_text())}
    runs = {path.name: json.loads(path.read_text()) for path in (LAB / "runs").glob("*.json")}
    assert [name for name, run in runs.items() if run["section"] not in sections] == []
    assert [name for name, run in runs.items() if not run["results"] and not run.get("tried")] == []
