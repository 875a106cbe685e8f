"""Product code uses private names of libraries only where docs/compatibility.md lists them, with reasons."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator

from tests.pages import ROOT

NOT_PRODUCT = ("tests/", "bench/lab/", "findings/")
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_exit"}
"""Of named tuples and of `os`, by their documentation."""


def trees() -> dict[str, ast.Module]:
    files = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    product = [file for file in files if not file.startswith(NOT_PRODUCT) and "_pb2" not in file]
    return {file: ast.parse((ROOT / file).read_text()) for file in product}


def defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield name


def used(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names that are not the product's. `own`: names of its classes, of which `self` may be one."""
    here = {*defined(tree)}
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"))
                | ast.Attribute(attr=name, value=ast.Call(func=ast.Name(id="super")))
            ):
                found = [] if name in own else [name]
            case ast.Attribute(attr=name):
                found = [] if name in here else [name]
            case ast.ImportFrom(module=str(module), level=0) if not module.startswith("baton."):
                found = [*module.split("."), *(each.name for each in node.names)]
            case ast.Import():
                found = [part for each in node.names for part in each.name.split(".")]
            case _:
                continue
        yield from (name for name in found if _PRIVATE.fullmatch(name) and name not in PUBLIC)


def test_private_names_of_libraries_are_those_of_the_page() -> None:
    product = trees()
    own = {name for tree in product.values() for name in defined(tree)}
    page = (ROOT / "docs/compatibility.md").read_text()
    section = page.partition("## Private names of libraries\n")[2].partition("\n## ")[0]
    listed = {name for name in re.findall(r"`(\w+)`", section) if _PRIVATE.fullmatch(name)}
    found = {(file, name) for file, tree in product.items() for name in used(tree, own)}
    assert {(file, name) for file, name in found if name not in listed} == set()
    texts = "".join((ROOT / file).read_text() for file in product)
    assert {name for name in listed if not re.search(rf"\b{name}\b", texts)} == set(), "none of them is used"


def test_private_names_are_found() -> None:
    text = "import a._b\nfrom c import _d\nclass E:\n def _f(self, x): self._f; self._g; x._f; x._h; x.i"
    tree = ast.parse(text)
    assert [*used(tree, {*defined(tree)})] == ["_b", "_d", "_g", "_h"]
