"""The driver of all benches: `python -m baton.bench.NAME [--json PATH] [--device cpu|cuda] [--short]`.

The module of a bench declares a `Bench`. The driver parses its command line, refuses what this machine cannot
measure, gives `Bench.measure` a `Run`, writes the report, and says by the exit code how it ended.
"""

import argparse
import shlex
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from baton.bench.report import Report, gpus
from baton.cluster.gpus import visible_gpus

T = TypeVar("T")

EXIT_FAILED, EXIT_CANNOT_MEASURE = 1, 2
MIN_PAIRS = 5
DEVICES = ("cpu", "cuda")
_NOT_REPORTED = ("json", "logs", "reports")
"""Arguments that decide nothing of what is measured."""


class CannotMeasure(Exception):
    """This machine lacks what a bench needs. The text says what."""


@dataclass(slots=True)
class Run(Report):
    """One run of a case: its report, and what the case needs to measure.

    Attributes:
        directory: for files of this run. It is removed at the end.
        failed: a side could not be measured. The report has the others.
    """

    args: argparse.Namespace = field(default_factory=argparse.Namespace)
    directory: Path = Path()
    failed: bool = False

    @property
    def device(self) -> str:
        return self.args.device

    @property
    def on_gpus(self) -> bool:
        return self.args.device == "cuda"

    @property
    def short(self) -> bool:
        return self.args.short

    @property
    def logs(self) -> Path:
        """For the logs of processes: that of --logs, or `directory`."""
        return getattr(self.args, "logs", None) or self.directory

    def as_dict(self) -> dict[str, Any]:
        """A run file of `docs/lab/runs`. Its last keys are filled by hand there."""
        return Report.as_dict(self) | {"section": None, "tried": None}

    def compare(
        self, name: str, ours: Callable[[], float], unit: str, theirs: Callable[[], float], to: str, *,
        pairs: int, **more: Any,
    ) -> None:  # fmt: skip
        """Measures both in turns. Adds the median of ours, and its ratio to theirs. `more`: as for
        `add_ratio`."""
        values, base = in_turns(ours, theirs, rounds=pairs)
        self.add_ratio(name, values, unit, base, to, **more)


def _said(default: Any) -> str:
    if isinstance(default, dict):
        return ", ".join(f"{value} on {'GPUs' if on == 'cuda' else 'a CPU'}" for on, value in default.items())
    return ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


def _on(device: str, default: Any) -> Any:
    return default.get(device) if isinstance(default, dict) else default


class Option:
    """An argument of a case, beside those of every case.

    Args:
        flag: its name, such as "--rounds".
        default: without the flag. A dict: by device. A number says the type, False that the flag has no
            value, and a list that it may be repeated.
        short: the same with --short; None: as `default`.
        settings: further ones of `argparse`.
    """

    def __init__(
        self, flag: str, help: str = "", default: Any = None, short: Any = None, **settings: Any
    ) -> None:
        self._flag, self._default, self._short, self._settings = flag, default, short, settings
        example = _on("cpu", default)
        if default is False:
            settings |= {"action": "store_true"}
        elif isinstance(example, list):
            settings |= {"action": "append", "type": int}
        elif isinstance(example, int | float):
            settings.setdefault("type", type(example))
        said = [_said(default)] if default not in (None, [], False) else []
        said += [f"{_said(short)} with --short"] if short is not None else []
        self._help = f"{help} (default: {'; '.join(said)})".strip() if said else help
        if settings.get("type") in (int, float):
            settings.setdefault("metavar", "N")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(self._flag, help=self._help.replace("%", "%%"), default=None, **self._settings)

    def settle(self, args: argparse.Namespace) -> None:
        """Puts the default in place of what the user left out."""
        name = self._flag.lstrip("-").replace("-", "_")
        if getattr(args, name) is None:
            short = args.short and self._short is not None
            setattr(args, name, _on(args.device, self._short if short else self._default))


LOGS = Option("--logs", "keep the logs of all processes there", type=Path, metavar="DIR")


@dataclass(frozen=True)
class Bench:
    """What one bench measures.

    Attributes:
        name: that of the command, and of all rows.
        measure: adds the rows. It may raise SystemExit with `EXIT_CANNOT_MEASURE`.
        about: what it measures, for --help.
        devices: where it can.
        check: may change the arguments. Raises ValueError for those that do not fit each other.
    """

    name: str
    measure: Callable[[Run], None]
    about: str | None
    options: Sequence[Option] = ()
    devices: Sequence[str] = DEVICES
    check: Callable[[argparse.Namespace], None] | None = None

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Returns the exit code. Raises SystemExit with `EXIT_CANNOT_MEASURE` if the arguments are wrong, or
        if this machine lacks what they ask for.

        From now on SIGTERM ends this process as Ctrl-C does, so the bench ends the processes that it has
        started.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _end)
        argv = sys.argv[1:] if argv is None else argv
        run = self.run(self.arguments(argv))
        words = [
            word for before, word in zip(("", *argv), argv, strict=False) if "--json" not in (before, word)
        ]
        run.command = shlex.join(["python", "-m", f"baton.bench.{self.name}", *words])
        with tempfile.TemporaryDirectory(prefix=f"baton-{self.name}-") as directory:
            run.directory = Path(directory)
            try:
                self.measure(run)
            except CannotMeasure as error:
                print(error, file=sys.stderr)
                sys.exit(EXIT_CANNOT_MEASURE)
        return run.finish() or EXIT_FAILED * run.failed

    def run(self, args: argparse.Namespace) -> Run:
        card = gpus()[0].partition(",")[0] if args.device == "cuda" else None
        return Run(self.name, parameters_of(args), args.json, card=card, args=args)

    def arguments(self, argv: Sequence[str]) -> argparse.Namespace:
        """argparse ends with 2 if an argument is wrong, which is `EXIT_CANNOT_MEASURE`."""
        p = argparse.ArgumentParser(
            prog=f"python -m baton.bench.{self.name}",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        p.add_argument("--json", type=Path, metavar="PATH", help="also write the report as JSON to PATH")
        p.add_argument(
            "--device",
            type=partial(_device, self.devices),
            default=self.devices[0] if len(self.devices) == 1 or not gpus() else "cuda",
            metavar="|".join(self.devices),
            help="where to measure (default: the GPU if there is one)",
        )
        p.add_argument("--short", action="store_true", help="a run under 50 s on 2 cores")
        for option in self.options:
            option.add_to(p)
        args = p.parse_args(argv)
        for option in self.options:
            option.settle(args)
        if getattr(args, "logs", None) is not None:
            args.logs.mkdir(parents=True, exist_ok=True)
        try:
            if self.check is not None:
                self.check(args)
        except ValueError as error:
            p.error(str(error))
        return args


def parameters_of(args: argparse.Namespace) -> dict[str, Any]:
    """Those that decide what is measured."""
    return {name: value for name, value in vars(args).items() if name not in _NOT_REPORTED}


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _device(devices: Sequence[str], device: str) -> str:
    if device not in devices:
        raise argparse.ArgumentTypeError(f"{device!r}: this bench measures on {' or '.join(devices)} only")
    if device == "cuda" and not gpus():
        raise argparse.ArgumentTypeError("this bench needs a GPU, and nvidia-smi shows none on this machine")
    return device


def in_turns(*sides: Callable[[], T], rounds: int) -> list[list[T]]:
    """Runs A B A B …, so that a machine whose speed drifts favours no side. Returns the series of each."""
    assert rounds >= MIN_PAIRS, f"a ratio takes at least {MIN_PAIRS} pairs, not {rounds}"
    results = [[side() for side in sides] for _ in range(rounds)]
    return [list(series) for series in zip(*results, strict=True)]


def median_ms(seconds: Iterable[float]) -> float:
    return statistics.median(seconds) * 1e3


def gpus_or_exit(count: int, why: str) -> int:
    """How many GPUs this process may use. Exits if the bench needs more."""
    present = len(visible_gpus())
    if present < count:
        print(f"{why} needs {count} GPUs, and there are {present}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_MEASURE)
    return present
