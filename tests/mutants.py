"""Mutants of Baton: each is a defect of one line that some tests of `make test` must find.

    python -m tests.mutants [part of a file's name]

`mutants.toml` has them. Each is applied in a copy of the tree, where its tests run. Exits with 1 if one
survives. One whose line has changed stops the run: write another one in its place."""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 300
"""For the tests of one mutant."""
PYTEST = (
    sys.executable, "-m", "pytest", "-x", "-q", "--timeout", "60", "-m", "not all and not long and not gpu",
)  # fmt: skip


def failed(copy: Path, tests: list[str]) -> str:
    """How the tests failed in the copy. Empty: they passed, or came to no end."""
    command = [*PYTEST, *tests]
    try:
        ran = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    assert ran.returncode not in (4, 5), f"pytest runs none of {tests}:\n{ran.stdout}{ran.stderr}"
    lines = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or [f"exit {ran.returncode}"])[0] if ran.returncode else ""


def main(part: str = "") -> int:
    listed = tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]
    mutants = [each for each in listed if part in each["file"]]
    died = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "baton"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for number, each in enumerate(mutants, 1):
            file = copy / each["file"]
            text = file.read_text()
            assert text.count(each["old"]) == 1, f"{each['file']} has not one place for {each['old']!r}"
            file.write_text(text.replace(each["old"], each["new"]))
            why = failed(copy, each["tests"])
            file.write_text(text)
            died += bool(why)
            print(number, each["file"], each["new"].strip(), why or "SURVIVED", sep=" | ", flush=True)
    print(f"{died} of {len(mutants)} died")
    return int(died < len(mutants))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
