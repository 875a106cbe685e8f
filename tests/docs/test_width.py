"""Lines of pages are at most 100 characters, so that a change of a word is a change of a short line."""

import re
from pathlib import Path

import pytest

from tests.pages import ROOT

from .test_links import prose

WIDTH = 100
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")])


def long_lines(text: str) -> list[str]:
    """Lines beyond the width, except of tables, of generated blocks, and of one word, such as a link."""
    text = re.sub(r"^<!-- generated: .*?^<!-- end -->$", "", text, flags=re.M | re.S)
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "![")))
    words = re.compile(r"^\s*(?:[-*+] |\d+\. )?(`[^`]*`|\S+)[,.:;]?$")
    return [line for line in lines if len(line) > WIDTH and not words.match(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    assert long_lines(prose(page)) == []
