"""The driver of benches: arguments, turns, the run file, exit codes."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from baton.bench.lab import driver
from baton.bench.lab.driver import EXIT_CANNOT_MEASURE, EXIT_FAILED, Bench, Option, Run, in_turns
from baton.bench.report import commit

OPTIONS = (
    Option("--rounds", "of both", {"cpu": 9, "cuda": 20}, short=5),
    Option("--tokens", "of a prompt", [100]),
    Option("--exact", "in the exact mode", False),
    Option("--only", choices=("a", "b")),
)


def settled(*argv: str) -> dict[str, object]:
    args = vars(Bench("toy", lambda run: None, None, OPTIONS).arguments(argv))
    return {name: args[name] for name in ("rounds", "tokens", "exact", "only")}


def test_a_default_is_that_of_the_device_and_of_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"rounds": 9, "tokens": [100], "exact": False, "only": None}
    assert settled("--device", "cpu") == usual
    assert settled("--device", "cpu", "--short") == usual | {"rounds": 5}
    monkeypatch.setattr(driver, "gpus", lambda: ["H200, 580"])
    assert settled() == usual | {"rounds": 20}
    given = ("--short", "--rounds", "0", "--tokens", "1", "--tokens", "2", "--exact", "--only", "b")
    assert settled(*given) == {"rounds": 0, "tokens": [1, 2], "exact": True, "only": "b"}


def test_sides_are_measured_in_turns_and_a_report_is_a_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()

    def side(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    def measure(run: Run) -> None:
        assert run.directory.is_dir()
        run.compare(
            "toy.step", lambda: side("a", 0.002), "ms", lambda: side("b", 0.001), "b", pairs=5, scale=1e3
        )
        run.failed = run.short

    monkeypatch.setattr(driver, "gpus", lambda: ["H200, 580"])
    bench, out = Bench("toy", measure, None, OPTIONS), tmp_path / "run.json"
    assert bench.main(["--json", str(out), "--exact"]) == 0
    assert order == ["a", "b"] * 5
    found = json.loads(out.read_text())
    said = {
        "bench": "toy",
        "card": "H200",
        "commit": commit(),
        "command": "python -m baton.bench.toy --exact",
    }
    assert found | said | {"note": None, "section": None, "tried": None} == found
    assert found["results"] == [
        {
            "name": "toy.step",
            "value": 2.0,
            "unit": "ms",
            "ratio": 2.0,
            "ratio_to": "b",
            "other": 1.0,
            "spread": 0.0,
        }
    ]
    assert bench.main(["--short"]) == EXIT_FAILED


def test_arguments_that_do_not_fit_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    def check(args: Namespace) -> None:
        raise ValueError("--exact: with --only a")

    with pytest.raises(SystemExit) as ended:
        Bench("toy", lambda run: None, None, OPTIONS, check=check).main([])
    assert ended.value.code == EXIT_CANNOT_MEASURE
    assert "--exact: with --only a" in capsys.readouterr().err


def test_a_ratio_takes_five_pairs() -> None:
    with pytest.raises(AssertionError, match="at least 5 pairs"):
        in_turns(int, int, rounds=4)
