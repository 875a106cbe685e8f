"""What all cases share: arguments, pairs of measurements, exit codes."""

import argparse
import shlex
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from baton.bench.report import Report, gpus
from baton.cluster.gpus import visible_gpus

T = TypeVar("T")

EXIT_CANNOT_MEASURE = 2
MIN_PAIRS = 5
DEVICES = ("cpu", "cuda")
_NOT_REPORTED = ("json", "logs", "reports")
"""Arguments that decide nothing of what is measured."""


def report_of(bench: str, args: argparse.Namespace, **more: Any) -> Report:
    """The report of a bench with these arguments. `more`: further parameters."""
    parameters = {name: value for name, value in vars(args).items() if name not in _NOT_REPORTED}
    card = gpus()[0].partition(",")[0] if args.device == "cuda" else None
    command = shlex.join(["python", "-m", f"baton.bench.{bench}", *sys.argv[1:]])
    return Report(bench, parameters | more, args.json, card=card, command=command)


def parser(description: str, devices: Sequence[str] = DEVICES) -> argparse.ArgumentParser:
    """The arguments of every bench. A bench adds further ones to the result.

    The bench can measure on `devices`. If the user asks for another device, or for one that this machine
    lacks, the parser exits with 2: argparse's code for a wrong argument, which equals `EXIT_CANNOT_MEASURE`.

    From now on SIGTERM ends this process as Ctrl-C does, so the bench ends the processes that it has started.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, metavar="PATH", help="also write the report as JSON to PATH")
    p.add_argument(
        "--device",
        type=partial(_device, devices),
        default=devices[0] if len(devices) == 1 or not gpus() else "cuda",
        metavar="|".join(devices),
        help="where to measure (default: the GPU if there is one)",
    )
    p.add_argument("--short", action="store_true", help="a run under 50 s on 2 cores")
    return p


def with_counts(p: argparse.ArgumentParser, **counts: tuple[int, int]) -> argparse.Namespace:
    """Parses the command line. Each count is an argument, too: how much is done usually, and with --short."""
    for name, (usual, short) in counts.items():
        p.add_argument(f"--{name}", type=int, metavar="N", help=f"default: {usual}; {short} with --short")
    args = p.parse_args()
    for name, (usual, short) in counts.items():
        setattr(args, name, getattr(args, name) or (short if args.short else usual))
    return args


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _device(devices: Sequence[str], device: str) -> str:
    if device not in devices:
        raise argparse.ArgumentTypeError(f"{device!r}: this bench measures on {' or '.join(devices)} only")
    if device == "cuda" and not gpus():
        raise argparse.ArgumentTypeError("this bench needs a GPU, and nvidia-smi shows none on this machine")
    return device


def interleaved(a: Callable[[], T], b: Callable[[], T], pairs: int) -> tuple[list[T], list[T]]:
    """Runs A B A B …, so that a machine whose speed drifts favours neither side. Returns both series."""
    assert pairs >= MIN_PAIRS, f"a ratio takes at least {MIN_PAIRS} pairs, not {pairs}"
    results = [(a(), b()) for _ in range(pairs)]
    return [of_a for of_a, _ in results], [of_b for _, of_b in results]


def median_ms(seconds: Iterable[float]) -> float:
    return statistics.median(seconds) * 1e3


def gpus_or_exit(count: int, why: str) -> int:
    """How many GPUs this process may use. Exits if the bench needs more."""
    present = len(visible_gpus())
    if present < count:
        print(f"{why} needs {count} GPUs, and there are {present}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_MEASURE)
    return present
