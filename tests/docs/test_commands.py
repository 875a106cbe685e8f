"""Each command of the pages is typed by a test, or says why not. It uses flags and files that exist."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from baton.bench.load.cli import app as bench_app
from baton.cluster.cli import app as baton_app
from tests.pages import PAGES, ROOT, blocks

LANGUAGES = {"", "text", "yaml", "toml", "python", "json", "mermaid"}
COMMAND = re.compile(r"^ *(\$ |(\S*/)?(baton|curl|docker|jq|kubectl|make|openssl|pip|python3?) )", re.M)
TYPED = {
    ROOT / page
    for test in (ROOT / "tests").rglob("test_*.py")
    for page in re.findall(r'\btyped\("([\w./-]+)"\)', test.read_text())
}


def baton_lines(page: Path) -> Iterator[list[str]]:
    """The `baton` commands of a page: the words up to the next command."""
    for block in blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ |exec |\S*/)*(baton .*)", line.strip())
            if found and "…" not in line:
                words = shlex.split(found[1], comments=True)
                end = next((i for i, word in enumerate(words) if word in ("&", "|", "&&", ">")), len(words))
                yield words[:end]


@cache
def group_of(app: typer.Typer) -> TyperGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def wrong(words: list[str]) -> str | None:
    """What `baton` would say of the values of its arguments; None if it takes them. A file need not exist.

    Raises the parser's own exception for a flag that does not exist."""
    app, words = (bench_app, words[2:]) if words[1] == "bench" else (baton_app, words[1:])
    try:
        group_of(app).commands[words[0]].make_context(words[0], words[1:])
    except typer.BadParameter as error:
        return None if "does not exist" in str(error) else str(error)
    except typer.Exit:  # --help
        pass
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands(page: Path) -> None:
    for block in blocks(page):
        language, _, untested = block.info.partition(" ")
        assert language in LANGUAGES or language == "bash", f"```{block.info}"
        if language == "bash":
            assert page in TYPED or re.fullmatch("no-test: .+", untested), block.text
        else:
            assert language not in ("", "text") or not COMMAND.search(block.text), "a block bash"
    assert not {" ".join(words): said for words in baton_lines(page) if (said := wrong(words))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths(page: Path) -> None:
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
    named = set(re.findall(rf"[` ](?:\./)?((?:{folders})/[\w./-]*\w)", page.read_text()))
    missing = [path for path in named if not (ROOT / path).exists() and not (page.parent / path).exists()]
    assert [path for path in missing if "NAME" not in path] == []


def test_every_page_that_a_test_types_has_commands_and_exists() -> None:
    assert len(TYPED) >= 3
    for page in TYPED:
        assert [block for block in blocks(page) if block.info == "bash"], page
