"""The output of `baton serve`: live progress rows in a terminal, plain lines elsewhere."""

import contextlib
import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from baton.cluster.supervision.blueprint import Blueprint
from baton.processes.tree import own_age

DEFAULT_URL = "http://127.0.0.1:8000"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Goes on without output. By default rich would end the process, as `baton serve | head` does."""
        self.quiet = True


class Display:
    """Shows progress while it is entered as a context manager. `line` and `error` work at any time.

    If there are more roles than the terminal has lines, it shows lines in place of rows.

    Lines that cannot be written, as on a full disk, are lost: no output may end a cluster.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or _Console(highlight=False, soft_wrap=True)
        self._started = time.monotonic() - own_age()  # includes the time before this object was made
        self._stages: dict[str, str] = {}
        self._rows: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.fields[name]:<10}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def stage(self, name: str, stage: str, fraction: float) -> None:
        """Shows that `name` has reached `stage` and `fraction` (0 to 1). The last stage is "ready"."""
        if self._progress is not None and name not in self._rows and len(self._rows) >= self._console.height:
            self._progress.stop()  # each change would draw all rows again, and no terminal shows them
            self._progress = None
        if self._progress is not None:
            if name not in self._rows:
                self._rows[name] = self._progress.add_task(stage, name=name, total=1.0)
            done = 1.0 if stage == "ready" else min(fraction, 0.99)  # only "ready" completes the bar
            self._progress.update(self._rows[name], description=stage, completed=done)
        elif self._stages.get(name) != stage:
            self.line(f"{time.monotonic() - self._started:6.1f} s  {name}: {stage}")
        self._stages[name] = stage

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False)

    def error(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(f"Error: {text}", style="red", markup=False)

    def ready(self, blueprint: Blueprint, admin_url: str, logs: Path | str, stop: str = "Ctrl-C") -> None:
        """Prints the endpoint and example commands.

        `admin_url`: the URL for `baton status`. `stop`: how to end the cluster."""
        model = blueprint.served_names()[0]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
            "max_tokens": 32,
            "temperature": 0,
        }
        keys = blueprint.front.api_key or blueprint.front.api_key_file
        key = ' -H "Authorization: Bearer $BATON_API_KEY"' if keys else ""
        json_type = "-H 'Content-Type: application/json'"
        quoted = json.dumps(body).replace("'", "'\\''")
        self.line(f"\nReady in {time.monotonic() - self._started:.1f} s: {model} at {blueprint.url}/v1\n")
        self.line(f"  curl {blueprint.url}/v1/chat/completions {json_type}{key} -d '{quoted}'\n")
        chat, status = ("" if url == DEFAULT_URL else f" --url {url}" for url in (blueprint.url, admin_url))
        baton = own_command()
        self.line(f"Chat: {baton} chat{chat}\nWorkers: {baton} status{status}\nLogs: {logs}\nStop: {stop}")


def own_command() -> str:
    """How a shell in this directory starts `baton`: by its name alone only if the PATH has this one."""
    program, on_path = sys.argv[0], shutil.which("baton")
    if Path(program).name != "baton" or (on_path is not None and Path(on_path).samefile(program)):
        return "baton"
    return shlex.quote(program)
