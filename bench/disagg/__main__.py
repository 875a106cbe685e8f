"""Is disaggregation better than colocated engines? TTFT, gaps, throughput and goodput under seven loads.

    python -m baton.bench.disagg [--layout 1p1d] [--against 'NAME=URL[,URL] FLAGS' …] [--loads L,L]
        [--rates R,R] [--seconds S] [--only NAME,NAME] [--html PATH] [--json PATH] [--short]

The sides are each endpoint of --against, Baton colocated (decode workers only), and Baton with the layout.
--only can also name "split": the layout with --no-overflow, so that every request is handed over.
All get the same prompts at the same times from `baton bench`. Several URLs of an endpoint take turns.
Start endpoints without a prefix cache, or give another --seed each time. Baton's workers start here, with
--tensor-parallel-size GPUs each, default flags, and random weights of --model-shape. The rates of the loads
suit the 8B shape on one GPU; choose --rates for another. On a CPU the embedded model gets smaller loads.

--with adds the sides of an earlier report without measuring them again, for engines that need the same GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import baton.bench.contract as contract
from baton.bench.contract import Report
from baton.bench.disagg.loads import LOADS, MIN_SECONDS, SHORT, Load, Pace, command, warm_up
from baton.bench.disagg.results import Point, line, page, point, rows, run
from baton.bench.disagg.sides import COLOCATED, LAYOUTS, SPLIT, Side, against, baton, pools
from baton.bench.shapes import DENSE, SHAPES

REQUESTS = {"cuda": (300, 50), "cpu": (20, 4)}  # of each rate; with --short


def measure(
    sides: Sequence[Side],
    loads: Sequence[Load],
    pace: Pace,
    report: Report,
    directory: Path,
    html: Path | None,
) -> None:
    """Measures all sides. Writes the page after each run."""
    measured: dict[str, dict[str, Any]] = report.detail["sides"]
    layout = report.parameters["layout"]
    for side in sides:
        points: list[Point] = []
        measured[side.name] = {"flags": dict(side.flags), "points": points}
        base = next((name for name in measured if name not in (side.name, layout)), None)
        with side.serve() as url:
            for load in loads:
                for arguments in () if report.parameters["short"] else warm_up(load, pace):
                    run(url, arguments, directory / "run.json")
                for level in load.levels:
                    found = run(url, command(load, level, pace, directory), directory / "run.json")
                    points.append(point(load, level, found))
                    print(line(side.name, load, points[-1]), flush=True)
                    other = _point_of(measured, base, points[-1])
                    judged = side.name == layout and report.parameters["device"] == "cuda"
                    for row in rows(side.name, load, points[-1], other, judged=judged):
                        report.add(row)
                    if html is not None:
                        html.write_text(page(report.as_dict()))


def _point_of(
    measured: dict[str, dict[str, Any]], side: str | None, like: Point
) -> tuple[str, dict[str, Any]] | None:
    """The results of another side at the same load and level."""
    for found in measured[side]["points"] if side is not None else ():
        if (found["load"], found["level"]) == (like["load"], like["level"]):
            return str(side), found["results"]
    return None


def chosen_loads(args: argparse.Namespace) -> list[Load]:
    """Raises ValueError for a name that is no load."""
    named = {load.name: load for load in LOADS}
    names = args.loads or (SHORT if args.short else named)
    if unknown := set(names) - named.keys():
        raise ValueError(f"--loads {','.join(sorted(unknown))}: there are {', '.join(named)}")
    if args.device == "cpu":
        found = [named[name].small() for name in names]
    else:
        workers = sum(pools(args.layout))
        found = [named[name].at([level * workers / 2 for level in named[name].levels]) for name in names]
    return [load.at(args.rates or load.levels[: 1 if args.short else None]) for load in found]


def chosen_sides(args: argparse.Namespace, earlier: Sequence[str], directory: Path) -> list[Side]:
    """The endpoints, then Baton. Raises ValueError."""
    ours = baton(
        args.layout, args.device, args.worker_flags, directory, shape=args.model_shape,
        ranks=args.tensor_parallel_size,
    )  # fmt: skip
    sides = [*map(against, args.against), *ours]
    if args.only:
        names = [side.name for side in sides]
        if unknown := set(args.only) - set(names):
            raise ValueError(f"--only {','.join(sorted(unknown))}: there are {', '.join(names)}")
    sides = [side for side in sides if (side.name in args.only if args.only else side.name != SPLIT)]
    names = [*(side.name for side in sides), *earlier]
    if len(set(names)) < len(names):
        raise ValueError(f"two sides have the same name: {', '.join(names)}")
    needed, present = sum(pools(args.layout)) * args.tensor_parallel_size, len(contract.gpus())
    if (
        args.device == "cuda"
        and {COLOCATED, SPLIT, args.layout} & set(names) - set(earlier)
        and present < needed
    ):
        told = f"--layout {args.layout} --tensor-parallel-size {args.tensor_parallel_size}"
        raise ValueError(f"{told} needs {needed} GPUs, and there are {present}")
    return sides


def _names(text: str) -> list[str]:
    return text.split(",")


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def arguments() -> argparse.ArgumentParser:
    p = contract.parser(__doc__ or "")
    add = p.add_argument
    add("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="of Baton (default: 1p1d)")
    endpoint = "an OpenAI endpoint that runs, and how it was started; may be repeated"
    add("--against", action="append", default=[], metavar="'NAME=URL[,URL] FLAGS'", help=endpoint)
    add("--with", dest="earlier", type=Path, metavar="FILE", help="an earlier report (--json)")
    add("--only", type=_names, default=[], metavar="NAME,…", help="measure these sides")
    add("--loads", type=_names, metavar="LOAD,…", help=", ".join(load.name for load in LOADS))
    levels = "requests/s, or users, instead of those of each load"
    add("--rates", type=_rates, metavar="R,…", help=levels)
    least = f"of each rate, at least (default: {REQUESTS['cuda'][0]} on GPUs)"
    add("--requests", type=int, metavar="N", help=least)
    add("--seconds", type=float, metavar="S", help="of each rate, at most (default: no limit)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    flags = "for all workers of Baton, such as '--ttit-target 20'"
    add("--worker-flags", default="", metavar="FLAGS", help=flags)
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs of each worker of Baton")
    add("--model-shape", choices=SHAPES, default=DENSE, metavar="NAME", help=f"on GPUs (default: {DENSE})")
    add("--logs", type=Path, metavar="DIR", help="keep the logs of all processes there")
    add("--html", type=Path, metavar="PATH", help="draw the results as a page")
    return p


def main() -> int:
    p = arguments()
    args = p.parse_args()
    requests = args.requests or REQUESTS[args.device][args.short]
    least = 0.0 if args.short or args.device == "cpu" else MIN_SECONDS
    pace = Pace(requests, least, args.seconds, args.seed)
    earlier = json.loads(args.earlier.read_text())["detail"]["sides"] if args.earlier is not None else {}
    with tempfile.TemporaryDirectory(prefix="baton-disagg-") as temporary:
        directory = args.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            if args.html is not None:
                contract.require_plotly()
            sides, loads = chosen_sides(args, list(earlier), directory), chosen_loads(args)
        except ValueError as error:
            p.error(str(error))
        args.requests = requests
        report = Report.of("disagg", args)
        report.detail = {"sides": earlier}
        measure(sides, loads, pace, report, directory, args.html)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
