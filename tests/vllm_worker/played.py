"""Objects of vLLM, and of modules that import it, as tests play them. Their members are looked up in the
source, since the environment of the tests cannot import vLLM."""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.vllm_worker.engines import PYTHON, ROOT


def played(module: str, name: str, **fields: Any) -> Any:
    """An object with these fields of a class. `module`: a path like `vllm/outputs.py`."""
    unknown = fields.keys() - _names(module, name)
    assert not unknown, f"{name} has no {unknown}"
    return SimpleNamespace(**fields)


def annotated(module: str, name: str) -> set[str]:
    """The fields that the class itself declares."""
    fields = (node.target for node in _classes(module)[name].body if isinstance(node, ast.AnnAssign))
    return {field.id for field in fields if isinstance(field, ast.Name)}


def function(module: str, name: str, **names: Any) -> Callable[..., Any]:
    """A function of a module. `names`: what it, and its annotations, read there."""
    [found] = (node for node in _body(module) if isinstance(node, ast.FunctionDef) and node.name == name)
    exec(compile(ast.Module([found], []), module, "exec"), names)  # noqa: S102  its own code is tested
    return names[name]


def _classes(module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _body(module) if isinstance(node, ast.ClassDef)}


def _body(module: str) -> list[ast.stmt]:
    installed = (PYTHON.parents[1] / "lib").glob(f"python*/site-packages/{module}")
    return _parsed(next(installed, ROOT / module)).body


@cache
def _names(module: str, name: str) -> frozenset[str]:
    """All members of a class and of its bases in the same module."""
    classes = _classes(module)
    names, left = set[str](), [name]
    while left:
        if (found := classes.get(left.pop())) is None:
            continue
        left += [base.id for base in found.bases if isinstance(base, ast.Name)]
        for node in ast.walk(found):
            match node:
                case (
                    ast.AnnAssign(target=ast.Name(id=field))
                    | ast.FunctionDef(name=field)
                    | ast.AsyncFunctionDef(name=field)
                    | ast.Attribute(value=ast.Name(id="self"), attr=field, ctx=ast.Store())
                ):
                    names.add(field)
    return frozenset(names)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
