"""What `baton serve` shows while it starts and runs: live rows in a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cluster.plan import Plan
from cluster.processes import own_age

DEFAULT_URL = "http://127.0.0.1:8000"


class Display:
    """A context manager around the start; `line` works before, within and after it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._started = time.monotonic() - own_age()  # what the user waited
        self._stages: dict[str, str] = {}
        self._begins: list[tuple[float, str, str]] = []  # of stages: when, whose, which
        self._rows: dict[str, TaskID] = {}
        self._begins.append((self._started, "command", "imports, options, the model's digest"))
        self._begins.append((time.monotonic(), "command", "ready"))
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

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def stage(self, name: str, stage: str, fraction: float) -> None:
        """`name` is in `stage`; "ready" is the last one. A line for each stage, a bar for each name."""
        if self._stages.get(name) != stage:
            self._begins.append((time.monotonic(), name, stage))
        if self._progress is not None:
            if name not in self._rows:
                self._rows[name] = self._progress.add_task(stage, name=name, total=1.0)
            done = 1.0 if stage == "ready" else min(fraction, 0.99)  # a stage at its end is not the end
            self._progress.update(self._rows[name], description=stage, completed=done)
        elif self._stages.get(name) != stage:
            self.line(f"{time.monotonic() - self._started:6.1f} s  {name}: {stage}")
        self._stages[name] = stage

    def timings(self) -> None:
        """How long every stage took, in order; what runs at the same time shares the cores."""
        self.line(f"\n{'begin':>7} {'took':>7}")
        for number, (begin, name, stage) in enumerate(self._begins):
            later = [at for at, other, _ in self._begins[number + 1 :] if other == name]
            if later:  # else it is the last one, "ready"
                self.line(f"{begin - self._started:6.2f}s {later[0] - begin:6.2f}s  {name}: {stage}")

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    def error(self, text: str) -> None:
        self._console.print(f"Error: {text}", style="red", markup=False)

    def ready(self, plan: Plan, admin_url: str, logs: Path) -> None:
        """The endpoint, and a command that shows that it works; `admin_url` is where the router tells of the
        workers."""
        model = plan.served_name()
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 32,
            "temperature": 0,
        }
        keys = plan.front.api_key or plan.front.api_key_file
        key = ' -H "Authorization: Bearer $BATON_API_KEY"' if keys else ""
        json_type = "-H 'Content-Type: application/json'"
        quoted = json.dumps(body).replace("'", "'\\''")
        self.line(f"\nReady in {time.monotonic() - self._started:.1f} s: {model} at {plan.url}/v1\n")
        self.line(f"  curl {plan.url}/v1/chat/completions {json_type}{key} -d '{quoted}'\n")
        chat, status = ("" if url == DEFAULT_URL else f" --url {url}" for url in (plan.url, admin_url))
        self.line(f"Chat: baton chat{chat}   Workers: baton status{status}\nLogs: {logs}\nStop: Ctrl-C")
