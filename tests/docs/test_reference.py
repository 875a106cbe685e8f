"""The generated reference pages are those of the code."""

import re
import tomllib

import pytest
import typer
from typer.core import TyperGroup

from baton.bench.load.cli import app as bench_app
from baton.cluster.cli import app as baton_app
from baton.cluster.options.parameters import REMOVED
from baton.router.api.openapi import description
from docs.reference.generate import BLOCK, BLOCKS, HERE, options, pages


def test_reference_pages_are_current() -> None:
    for name, text in pages().items():
        assert (HERE / name).read_text() == text, f"docs/reference/{name} is old: run `make reference`"
    assert sorted(found[1] for text in pages().values() for found in BLOCK.findall(text)) == sorted(BLOCKS)


def test_each_term_of_a_cost_has_one_row_in_the_table_below_the_formulas() -> None:
    formulas, rows = "\n".join(BLOCKS["terms"]()).split("\n```\n")
    costs = dict(line.split(" = ") for line in formulas.splitlines()[1:])
    costs = {name.strip(): re.findall(r"[A-Za-z]+'?", formula) for name, formula in costs.items()}
    words = {"c", "N", "at", "two", "workers", "min"}
    used = {term for terms in costs.values() for term in terms} - {*costs} - words
    explained = [term for names in re.findall(r"^\| `(.*?)` \|", rows, re.M) for term in names.split(", ")]
    assert sorted(explained) == sorted(used)


def test_the_list_of_suites_has_each_test_once_with_its_outcome() -> None:
    for name, suite in tomllib.loads((HERE.parent / "suites.toml").read_text()).items():
        listed = suite["passed"] + [test for group in suite["not_passed"] for test in group["tests"]]
        assert len(listed) == len(set(listed))
        assert all(group["reason"] and group["tests"] for group in suite["not_passed"])
        assert len({group["reason"] for group in suite["not_passed"]}) == len(suite["not_passed"])
        files = {test.partition("::")[0] for test in [*listed, *suite["silent"]]}
        assert all(file.startswith(tuple(suite["files"])) for file in files)
        assert suite["runs"][0]["tests"] == suite["files"]
        taken = [test for run in suite["runs"][1:] for test in run["tests"]]
        assert all(any(known.startswith(test) for known in listed) for test in taken)
        assert f"**{name} {suite['version']}**: {len(listed)} tests" in pages()["../compatibility.md"]


@pytest.mark.parametrize(("app", "prefix"), [(baton_app, "baton"), (bench_app, "baton bench")])
def test_each_option_stands_once_with_its_command_or_in_a_group_that_this_links(
    app: typer.Typer, prefix: str
) -> None:
    page = pages()["cli.md"]
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name, command in group.commands.items():
        section = page.split(f"\n## {prefix} {name}\n")[1].split("\n## ")[0]
        for _, line in options(command):
            assert page.splitlines().count(line) == 1, line
            if line not in section.splitlines():
                before = page.partition(f"\n{line}\n")[0]
                users = before.rpartition("\nOf ")[2].partition(":")[0]
                panel = before.rpartition("\n### ")[2].partition("\n")[0]
                assert users == "every command" or f"`{name}`" in users.split(", "), (name, line)
                assert users == "every command" or f"[{panel}](#" in section, (name, line)


def test_each_field_of_a_body_stands_in_its_type_or_with_the_fields_of_several() -> None:
    sections: dict[str, str] = {}
    for section in pages()["api.md"].split("\n### ")[1:]:
        name, _, sections[name] = section.partition("\n\n")

    for name, schema in description("", keys=True, admin=True)["components"]["schemas"].items():
        lists = [name, *re.findall(r"\[(Fields of [^]]*)\]", sections[name])]
        found = re.findall(r"^- `(\w+)\??`", "\n".join(sections[each] for each in lists), re.M)
        assert sorted(found) == sorted(schema.get("properties", {})), name


def test_the_changelog_names_flags_that_exist_or_are_refused_with_their_successor() -> None:
    text = (HERE.parents[1] / "CHANGELOG.md").read_text()
    exist = "".join(pages().values()).replace("/ no-", "no-")
    for flag, prefix, name in re.findall(r"(?<![\w-])(--(advanced\.|no-)?([a-z][a-z-]*[a-z]))\b", text):
        is_setting = re.search(rf"^- `.*\b{name}[ `]", exist, re.M)
        if prefix == "advanced.":
            assert is_setting, flag
        else:
            known = is_setting or re.search(rf"{flag}\b", exist) or name.replace("-", "_") in REMOVED
            assert known or f"`{flag}`" in text.split("| gone;")[0].splitlines()[-1], flag
