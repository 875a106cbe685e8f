"""Installs a client into a directory, and runs its task against a router."""

import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.cluster.model import embedded_path
from baton.router.text.model_files import read_gguf
from baton.router.text.tokenizer import load_tokenizer
from tests.clients.catalog import NOTE, Client, filled, script
from tests.clients.model import FINAL, Seen, following, write_model
from tests.clients.recorder import Exchange, recording

PROGRAMS = Path(__file__).with_name("programs")
NODE = 22
"""The newest clients need at least this version."""
SECONDS = 120.0
"""What the task of a client may take."""
_QUIET = "--no-audit", "--no-fund", "--loglevel=error"


@dataclass(frozen=True)
class Run:
    """What a client did."""

    version: str
    exit_code: int
    output: str
    exchanges: list[Exchange]
    seen: list[Seen]
    wrote: bool
    """The note is there."""

    @property
    def done(self) -> bool:
        return self.exit_code == 0 and self.wrote and FINAL in self.output


def installed(client: Client, at: Path, path: str) -> str:
    """Installs the newest packages of a client. Returns the version of the first one.

    `path`: the value of PATH, as `node_path` returns it."""
    first = client.packages[0]
    if client.npm:
        (at / "package.json").write_text("{}")
        _run(("npm", "install", *_QUIET, *client.npm), at, path)
        for program in PROGRAMS.glob("*.mjs"):
            shutil.copy(program, at)
        return json.loads((at / "node_modules" / first / "package.json").read_text())["version"]
    _run((sys.executable, "-m", "venv", str(at)), at)
    _run((str(at / "bin" / "pip"), "install", "-q", *client.pip), at)
    package = re.sub(r"\[.*", "", first)
    said = _run((str(at / "bin" / "pip"), "show", package), at)
    return re.findall("^Version: (.*)$", said, re.MULTILINE)[0]


def node_path(at: Path) -> str:
    """Returns a value of PATH with a recent Node. npm brings it, where the machine has an old one."""
    path = os.environ["PATH"]
    if int(_run(("node", "--version"), at).lstrip("v").partition(".")[0]) >= NODE:
        return path
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    package = f"node-{sys.platform}-{machine}"
    (at / "package.json").write_text("{}")
    _run(("npm", "install", *_QUIET, f"{package}@{NODE}"), at)
    return f"{at / 'node_modules' / package / 'bin'}{os.pathsep}{path}"


def _end_all(home: str) -> None:
    """Ends all processes with this home: cline starts a daemon that leaves its process group."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == home:
                process.kill()


def _run(command: Sequence[str], at: Path, path: str | None = None) -> str:
    """Raises CalledProcessError."""
    environment = os.environ | ({} if path is None else {"PATH": path})
    return subprocess.run(
        command, cwd=at, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


async def did(client: Client, version: str, packages: Path, path: str, at: Path) -> Run:
    """Runs the task of a client that `installed` has put into `packages`. `at`: an empty directory."""
    home, work = at / "home", at / "work"
    home.mkdir()
    work.mkdir()
    places = {"HOME": str(home), "WORK": str(work), "INSTALLED": str(packages), "PROGRAMS": str(PROGRAMS)}

    calls = script(client, places)
    tokenizer = load_tokenizer(str(write_model(at / "model", read_gguf(embedded_path()).tokenizer)))
    async with following(calls, tokenizer, at) as (cluster, seen), recording(cluster.url) as recorder:
        places["URL"] = recorder.url
        for place, text in client.files.items():
            file = Path(filled(place, places))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(filled(text, places))
        environment = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb"}
        environment |= {name: filled(value, places) for name, value in client.environment.items()}
        output, code = "", 0
        for command in (*client.before, client.command):
            said, ended = await _ran([filled(part, places) for part in command], work, environment)
            output, code = output + said, code or ended
        note = work / "note.txt"
        wrote = note.exists() and note.read_text().strip() == NOTE
        return Run(version, code, output, recorder.exchanges, seen, wrote)


async def _ran(command: list[str], work: Path, environment: dict[str, str]) -> tuple[str, int]:
    """Returns output and exit code of a command. Nothing that it starts outlives it."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    ended = asyncio.create_task(process.wait())
    reading = asyncio.create_task(process.communicate())
    try:
        await asyncio.wait([ended], timeout=SECONDS)
    finally:
        _end_all(environment["HOME"])  # a daemon would hold the pipe open
    said, _ = await reading
    return said.decode(errors="replace"), await ended
