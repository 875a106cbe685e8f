"""Links between the pages resolve, to a file and to a heading in it."""

import re
from functools import cache
from pathlib import Path

from tests.pages import PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The text without blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)


@cache
def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        while name in names:
            stem, _, number = name.rpartition("-")
            name = f"{stem}-{int(number) + 1}" if stem and number.isdigit() else f"{name}-1"
        names.add(name)
    return names


def broken(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(f"{page.relative_to(ROOT)}: {link}")
    return found


def test_every_link_resolves() -> None:
    assert len(PAGES) > 5
    assert not [link for page in PAGES for link in broken(page)]
