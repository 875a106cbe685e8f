"""The choice among kernels by measurement."""

from pathlib import Path
from typing import Any

import torch

from baton.engine.kernels.fastest import Choices, Kernel

KERNELS: dict[str, Kernel] = {"slow": lambda x: x + 1, "fast": lambda x: x + 2}


def choices(path: Path, measured: list[str]) -> Choices:
    def seconds(kernel: Kernel, x: Any) -> float:
        measured.append(next(kind for kind in KERNELS if KERNELS[kind] is kernel))
        return {"slow": 2.0, "fast": 1.0}[measured[-1]]

    return Choices(path, seconds)


def test_each_size_is_measured_once_also_by_the_next_engine(tmp_path: Path) -> None:
    """Sizes are powers of two. An engine that started at the same time keeps what the other one measured."""
    path, x, measured = tmp_path / "new" / "kernels.json", torch.ones(1), list[str]()
    first, second = choices(path, measured), choices(path, measured)
    assert first.among("a", 33, x, KERNELS) is KERNELS["fast"]
    assert first.among("a", 64, x, KERNELS) is KERNELS["fast"]
    assert measured == ["slow", "fast"]
    assert second.among("b", 33, x, KERNELS, measures=False) is KERNELS["slow"]
    second.among("b", 33, x, KERNELS)
    assert len(measured) == 4
    for product in ("a", "b"):
        assert choices(path, measured).among(product, 50, x, KERNELS) is KERNELS["fast"]
    assert len(measured) == 4


def test_a_file_that_is_cut_short_or_names_another_kernel_is_not_used(tmp_path: Path) -> None:
    path, x, measured = tmp_path / "kernels.json", torch.ones(1), list[str]()
    for content in ('{"a rows 1"', "[1]", '{"a rows 1": "older"}'):
        path.write_text(content)
        assert choices(path, measured).among("a", 1, x, KERNELS) is KERNELS["fast"]
    assert len(measured) == 6


def test_without_a_place_for_the_file_each_engine_measures(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    measured = list[str]()
    ours = choices(tmp_path / "file" / "kernels.json", measured)
    assert ours.among("a", 1, torch.ones(1), KERNELS) is KERNELS["fast"]
    assert ours.among("a", 1, torch.ones(1), KERNELS) is KERNELS["fast"]
    assert len(measured) == 2
