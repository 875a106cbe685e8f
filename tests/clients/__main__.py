"""Runs real clients against a router with a scripted model: `python -m tests.clients [--record] NAME …`.

Each client is installed from npm or PyPI into a temporary folder, in its newest version. It does one task of
three turns with tools. Printed are its requests, what they have that the recording in `recorded` has not, and
how much of each turn was cached. A request with an error, a task that is not done, or a turn of which less
than `LEAST_CACHED` was cached ends the command with 1. `--record` writes the recording anew.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.clients.catalog import CLIENTS
from tests.clients.installed import did, installed, node_path
from tests.clients.report import record, report


def tried(name: str, tools: str, at: Path, *, rewrite: bool = False) -> list[str]:
    """Installs a client in `at` and runs its task. Prints what it did, and returns what is wrong.

    `tools`: the value of PATH, as `node_path` returns it."""
    client = CLIENTS[name]
    packages, task = at / "packages", at / "task"
    packages.mkdir(parents=True)
    task.mkdir()
    version = installed(client, packages, tools)
    run = asyncio.run(did(client, version, packages, tools, task))
    wrong = report(name, client, run)
    if rewrite and not wrong:
        record(name, client, run, task)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="+", choices=[*CLIENTS, "all"], metavar="NAME")
    parser.add_argument("--record", action="store_true", help="write the recordings anew")
    arguments = parser.parse_args()
    names = [*CLIENTS] if "all" in arguments.names else arguments.names
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        (node := Path(folder) / "node").mkdir()
        tools = node_path(node)
        for name in names:
            wrong += tried(name, tools, Path(folder) / name, rewrite=arguments.record)
    print(json.dumps({"wrong": wrong}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
