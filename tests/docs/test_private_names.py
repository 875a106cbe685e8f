"""Product code uses private names of libraries only where `LISTED` has them: no public form does the same.
Tests assert what is public, and import it."""

import ast
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.pages import ROOT

PRODUCT = ["git", "ls-files", "*.py", ":!tests/", ":!bench/lab/", ":!findings/", ":!*_pb2*"]
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_exit"}
"""Of named tuples and of `os`, by their documentation."""

LISTED = {
    # torch: attention on CPUs that also returns the logarithm of the sum, for sinks and parts.
    "_scaled_dot_product_flash_attention_for_cpu",
    # torch: oneDNN's packed weights on CPUs.
    "_get_mkldnn_serialized_md",
    "_is_mkldnn_bf16_supported",
    "_linear_pointwise",
    "_nbytes",
    "_reorder_linear_weight",
    # torch: a tensor over packed weights in shared memory.
    "_C",
    "_aoti",
    # torch: products of 4 bits on CPUs.
    "_convert_weight_to_int4pack_for_cpu",
    "_weight_int4pack_mm_for_cpu",
    # torch: products in FP8; `torch.nn.functional.scaled_mm` is not tried yet on all forms of scales.
    "_scaled_mm",
    # torch: many copies in one launch.
    "_foreach_copy_",
    # torch: memory of other GPUs for sums of ranks.
    "_symmetric_memory",
    # vLLM: a prompt is cut, and the public list is read-only.
    "_all_token_ids",
    # vLLM: whether a version cuts chunks within large blocks.
    "_mamba_block_aligned_split",
    # vLLM: a kernel for CPUs that does not write its output (`cpu_drafts.py`).
    "_impl",
    # NIXL: its classes with settings and typed errors, which the public one wraps.
    "_bindings",
    # Jinja: documented for subclasses of `Undefined`.
    "_undefined_message",
    "_undefined_obj",
}


def trees(listed: list[str]) -> dict[str, ast.Module]:
    """By their files, which this command lists."""
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {file: ast.parse((ROOT / file).read_text()) for file in files}


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


@pytest.mark.all
def test_private_names_of_libraries_are_those_of_the_list() -> None:
    product = trees(PRODUCT)
    own = {name for tree in product.values() for name in defined(tree)}
    found = {(file, name) for file, tree in product.items() for name in used(tree, own)}
    assert {(file, name) for file, name in found if name not in LISTED} == set()
    texts = "".join((ROOT / file).read_text() for file in product)
    assert {name for name in LISTED if not re.search(rf"\b{name}\b", texts)} == set(), "none of them is used"


@pytest.mark.all
def test_tests_assert_no_private_names_and_import_none() -> None:
    found = set[tuple[str, str]]()
    listed = [
        "git",
        "grep",
        "-lE",
        r"\._[a-z]|import.* _|^    _\w+,",
        "--",
        "tests/*.py",
    ]  # the others have none
    for file, tree in trees(listed).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                found |= {(file, each.name) for each in node.names}
            elif isinstance(node, ast.Assert):
                inside = (each for each in ast.walk(node.test) if isinstance(each, ast.Attribute))
                found |= {(file, each.attr) for each in inside if not is_self(each.value)}
    assert {(file, name) for file, name in found if _PRIVATE.fullmatch(name) and name not in PUBLIC} == set()


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
