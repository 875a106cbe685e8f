"""The generated reference pages are those of the code."""

from __future__ import annotations

import pytest
import typer
from typer.core import TyperGroup

from baton.bench.load.cli import app as bench_app
from baton.cluster.cli import app as baton_app
from baton.router.api.openapi import description
from docs.reference.generate import HERE, options, pages


def test_reference_pages_are_current() -> None:
    for name, text in pages().items():
        assert (HERE / name).read_text() == text, f"docs/reference/{name} is old: run `make reference`"


@pytest.mark.parametrize("app", [baton_app, bench_app], ids=["baton", "baton bench"])
def test_each_option_stands_once(app: typer.Typer) -> None:
    page = pages()["cli.md"]
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    lines = {line for command in group.commands.values() for _, line in options(command)}
    assert len(lines) > 20
    assert {line: page.count(f"{line}\n") for line in lines} == dict.fromkeys(lines, 1)


def test_each_field_of_a_body_stands_in_its_type_or_in_one_that_it_names() -> None:
    sections: dict[str, str] = {}
    for section in pages()["api.md"].split("\n### ")[1:]:
        name, _, sections[name] = section.partition("\n\n")

    def text(name: str) -> str:
        above = [line for line in sections[name].splitlines() if line.startswith("The fields of [")]
        named = [other for line in above for other in sections if f"[{other}]" in line]
        return "\n".join([sections[name], *map(text, named)])

    for name, schema in description("", keys=True, admin=True)["components"]["schemas"].items():
        missing = [field for field in schema.get("properties", {}) if f"- `{field}`" not in text(name)]
        assert not missing, name
