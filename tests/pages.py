"""The pages: README.md, docs/, the README of each package, and the commands in them.

A fenced block `bash` is a command that a test types. A block `bash no-test: REASON` is a command that no test
types. A block `text` after a command shows what it prints, where … stands for anything.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
_FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.M)


@dataclass(frozen=True)
class Block:
    info: str
    """What follows the opening fence: a language, and where no test types it the reason."""
    text: str


@dataclass(frozen=True)
class Step:
    command: str
    printed: str
    """What the page shows below the command; empty if nothing."""

    def missing(self, output: str) -> list[str]:
        """The lines that the page shows and `output` has not."""
        return [
            line
            for line in self.printed.splitlines()
            if not re.search(".*".join(map(re.escape, line.split("…"))), output)
        ]


def blocks(page: Path) -> Iterator[Block]:
    for found in _FENCE.finditer(page.read_text()):
        yield Block(found[2].strip(), found[3])


def typed(page: str) -> list[Step]:
    """The commands of a page that a test has to type, in order. `page` is a path below the repository."""
    found = list(blocks(ROOT / page))
    return [
        Step(block.text, after.text if after.info == "text" else "")
        for block, after in zip(found, [*found[1:], Block("", "")], strict=True)
        if block.info == "bash"
    ]
