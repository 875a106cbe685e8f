"""The tour of docs/architecture.md leads through files and names that exist, and is as short as it says."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_, TOUR = (ROOT / "docs/architecture.md").read_text().split("\n## A tour", 1)
SEAMS = re.findall(r"^- \[([^\]]+)\]\(\.\./([^)]+)\):\s(.*?)(?=^- |^\n|\Z)", TOUR, re.M | re.S)
STEPS = re.findall(r"^(\d+)\. \[([^\]]+)\]\(\.\./([^)]+)\):\s(.*?)(?=^\d+\. |^#|\Z)", TOUR, re.M | re.S)
NO_NAMES = {"stream: true", "finally"}


def defined(file: str) -> set[str]:
    """Functions, classes, and methods as `Class.method`, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
            found |= {
                f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.AsyncFunctionDef)
            }
    return found


def test_the_tour_is_one_evening() -> None:
    files = [file for _, _, file, _ in STEPS]
    assert [int(number) for number, *_ in STEPS] == list(range(1, len(files) + 1))
    assert len(files) == len({*files}) <= 15
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 4000


def test_its_names_exist() -> None:
    everywhere = {name for _, _, file, _ in STEPS for name in defined(file)}
    for _, shown, file, text in STEPS:
        assert shown == file
        names = re.findall(r"`([^`]+)`", text)
        assert {*names} - NO_NAMES <= everywhere, file
        assert {*names} & defined(file), f"the tour names something of {file}"


def test_the_seams_between_processes_have_names_of_their_files() -> None:
    assert len(SEAMS) >= 3
    for shown, file, text in SEAMS:
        assert shown == file
        names = [name for name in re.findall(r"`([^`]+)`", text) if "/" not in name]
        assert names
        assert {*names} <= defined(file), file
