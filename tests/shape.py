"""What a script can count of the tree's shape: `make shape`. It reads the files that git tracks."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = 50
"""Lines. A file of at most so many may be a station that only passes things on."""
COMMANDS = ROOT / "docs/reference/cli.md"
CHART = ROOT / "deploy/helm/baton/files/options.json"
"""Both are generated from the commands."""
_FLAG = re.compile(r"^- `(?:-\w, )?(--[\w-]+)", re.MULTILINE)
_IMPORT = re.compile(r"^\s*(?:from baton\.(\w+)|from baton import (\w+)|import baton\.(\w+))", re.MULTILINE)
_PROTOCOL = re.compile(r"^class (\w+)\((?:.*, )?Protocol(?:\[.*\])?\)", re.MULTILINE)


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [path for name in listed.stdout.split("\0") if (path := ROOT / name).is_file() and name]
    python = {
        path.relative_to(ROOT): path.read_text().splitlines()
        for path in files
        if path.suffix == ".py" and "_pb2" not in path.name
    }
    tests = {path: lines for path, lines in python.items() if path.parts[0] == "tests"}
    code = {path: lines for path, lines in python.items() if path not in tests}
    modules = {path: lines for path, lines in code.items() if path.name != "__init__.py"}
    texts = {path: "\n".join(lines) for path, lines in code.items()}
    arrows = {
        (path.parts[0], target)
        for path, text in texts.items()
        for target in filter(None, (name for found in _IMPORT.findall(text) for name in found))
        if len(path.parts) > 1 and target != path.parts[0]
    }
    lines = [line for of_file in code.values() for line in of_file]
    words, with_letters = Counter[bool](), 0
    for path in files:
        if path.suffix == ".md":
            found = path.read_text().split()
            words[_is_page(path)] += len(found)
            with_letters += sum(any(map(str.isalpha, word)) for word in found)
    for name, value in {
        "lines without tests": sum(map(len, code.values())),
        "files without tests": len(code),
        f"files of at most {SMALL} lines, __init__ aside": sum(len(x) <= SMALL for x in modules.values()),
        "files of more than 400 lines": sum(len(of_file) > 400 for of_file in modules.values()),
        "Protocol classes": sum(len(_PROTOCOL.findall(text)) for text in texts.values()),
        "mean width of a line, empty ones included": f"{sum(map(len, lines)) / len(lines):.1f}",
        "arrows between packages": len(arrows),
        "flags of `baton serve --help`": len(json.loads(CHART.read_text())["commands"]["serve"]["flags"]),
        "flags of all commands": len({*_FLAG.findall(COMMANDS.read_text())}),
        "lines of tests": sum(map(len, tests.values())),
        "words of pages": words[True],
        "words of READMEs in folders": words[False],
        "of both, words with a letter: neither numbers nor marks of tables": with_letters,
    }.items():
        print(f"{value:>8}  {name}")
    print("\nlines by package")
    by_package = Counter[str]()
    for path, of_file in code.items():
        by_package[path.parts[0]] += len(of_file)
    for name, count in by_package.most_common():
        print(f"{count:>8}  {name}")


def _is_page(path: Path) -> bool:
    """Whether a reader finds the page in docs or at the top level."""
    folder = path.relative_to(ROOT).parts[0]
    return folder == "docs" or path.parent == ROOT


if __name__ == "__main__":
    main()
