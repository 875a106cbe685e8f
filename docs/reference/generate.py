"""Writes the generated blocks of pages: the commands from their help, the others from the code of the router.
Also writes the flags of commands for the Helm chart, which refuses others.

Run it with `make reference`. A test compares the pages with `pages()`.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from baton.bench.load import cli as bench
from baton.cluster.cli import app as baton_app
from baton.cluster.options import parameters
from baton.cluster.options.roles import FrontOptions
from baton.router.api import validation
from baton.router.api.openapi import OPERATIONS, REQUEST_ERRORS, description
from baton.router.policy import placement, split
from baton.worker.engine_process.states import ENDS, TRANSITIONS, State

HERE = Path(__file__).parent
Schema = dict[str, Any]

BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
"""What a page has from the code. The text around it is written by hand."""


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def prose(text: str) -> str:
    """Help text as Markdown: without the markup of a terminal, each paragraph on one line."""
    plain = re.sub(r"\[/?(?:bold|dim|cyan)\]", "", text).replace("\\[", "[").replace("<", "\\<")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in plain.split("\n\n"))


def record_of(each: Any, context: typer.Context) -> Any:
    """What `--help` says of an option, also of one that it hides. typer gives the same option again."""
    hidden, each.hidden = each.hidden, False
    try:
        return each.get_help_record(context)
    finally:
        each.hidden = hidden


def described(each: Any, context: typer.Context, *, hidden: bool = False) -> tuple[str, str] | None:
    """The panel of an option, and a line with its names, meaning and default. None: `--help` hides it.
    `hidden`: also then."""
    record = record_of(each, context) if hidden else each.get_help_record(context)
    if record is None:
        return None
    names, text = record
    meaning, _, facts = text.partition("  [")
    facts = re.sub(r"^(?:env var: \w+; )?(?:default: )?\(?(.*?)\)?\]$", r"\1", facts)
    default = "" if facts in ("", "required", "none", "off") else f" Default: {facts}."
    line = f"- `{names}`{' (required)' if facts == 'required' else ''}: {prose(meaning)}{default}"
    return getattr(each, "rich_help_panel", None) or "General", line


def options(command: Any) -> Iterator[tuple[str, str]]:
    """Each option that `--help` shows, as `described`."""
    context = typer.Context(command, info_name=command.name)
    yield from filter(None, (described(each, context) for each in command.params))


def advanced() -> Iterator[str]:
    """The advanced settings of all commands by their panels, and the commands that have them."""
    groups: Any = [typer.main.get_command(app) for app in (baton_app, bench.app)]
    commands = [
        *groups[0].commands.items(),
        *((f"bench {name}", each) for name, each in groups[1].commands.items()),
    ]
    users: dict[tuple[str, str], list[str]] = {}
    for name, command in commands:
        context = typer.Context(command, info_name=name)
        for each in command.params:
            if each.opts[0].startswith(ADVANCED):
                panel, line = described(each, context, hidden=True) or ("", "")
                users.setdefault((panel, line.replace(ADVANCED, "")), []).append(f"`{name}`")
    lines = sorted((panel, ", ".join(names), line) for (panel, line), names in users.items())
    for panel, of_panel in groupby(lines, key=lambda each: each[0]):
        yield f"## {panel}"
        for names, of_names in groupby(of_panel, key=lambda each: each[1]):
            yield "\n".join((f"Of {names}:\n", *(line for _, _, line in of_names)))


def commands(app: typer.Typer, prefix: str, title: str) -> Iterator[str]:
    """A section for each command, then the options that several commands share, under this title."""
    group: Any = typer.main.get_command(app)
    panels: dict[str, str] = {}
    users: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        for panel, line in options(command):
            panels.setdefault(line, panel)
            users.setdefault(line, []).append(name)
    lists: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for line, panel in panels.items():
        lists.setdefault((panel, tuple(users[line])), []).append(line)
    shared = sorted((panel, names) for panel, names in lists if len(names) > 1)
    every = tuple(name for name, command in group.commands.items() if command.params)
    for name, command in group.commands.items():
        yield f"## {prefix} {name}\n\n{prose(command.help)}"
        if command.epilog:
            examples = command.epilog.splitlines()
            yield "```bash no-test: a test checks the flags\n" + "\n".join(examples) + "\n```"
        taken = dict.fromkeys(panel for panel, names in shared if name in names and names != every)
        if taken:
            links = (f"[{panel}](#{panel.lower().replace(' ', '-')})" for panel in taken)
            yield f"Shared options: {', '.join(links)}."
        for panel, names in sorted(lists):
            if names == (name,):
                yield "\n".join((f"**{panel}**\n", *lists[panel, names]))
    yield f"## {title}"
    for panel, of_panel in groupby(shared, key=lambda each: each[0]):
        yield f"### {panel}"
        for _, names in of_panel:
            of = "every command" if names == every else ", ".join(f"`{name}`" for name in names)
            yield "\n".join((f"Of {of}:\n", *lists[panel, names]))


def cli() -> Iterator[str]:
    yield from commands(baton_app, "baton", "Shared options")
    yield prose((bench.__doc__ or "").partition("\n\n")[2])
    yield from commands(bench.app, "baton bench", "Shared options of baton bench")


ADVANCED = parameters.flag("", advanced=True)
CHART = "../../deploy/helm/baton/files/options.json"
IN_PODS = ("router", "prefill", "decode", "encode", "picker", "store", "serve")
"""The commands that pods of the chart run."""


def chart_options() -> str:
    """JSON: the kind of each flag, by command. `values` may come again, `aliases` have no variable, and
    `variables` no flag of this name."""
    group: Any = typer.main.get_command(baton_app)
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name in IN_PODS:
        context = typer.Context(group.commands[name], info_name=name)
        of = found[name] = {"flags": {}, "aliases": {}, "variables": {}, "choices": {}}
        for each in group.commands[name].params:
            if each.param_type_name != "option" or not each.envvar:
                continue
            kind = "switch" if each.is_flag else "values" if each.multiple else "value"
            choices = re.search(r" <([\w-]+(?:\|[\w-]+)+)>$", record_of(each, context)[0])
            own = parameters.flag(each.name)
            flags = {
                flag: "flags" if flag == own else "aliases" for flag in (*each.opts, *each.secondary_opts)
            }
            for flag, kinds in ({own: "variables"} | flags).items():
                of[kinds][flag] = kind
                if choices:
                    of["choices"][flag] = choices[1].replace("|", " ")
    refused = {parameters.flag(name): remedy for name, remedy in parameters.REMOVED.items()}
    refused |= {
        parameters.flag(name): f"Give {parameters.flag(name, advanced=True)}."
        for name in sorted(parameters.ADVANCED)
    }
    options = {"commands": found, "refused": refused, "request_timeout": FrontOptions.request_timeout}
    return json.dumps(options, indent=1) + "\n"


def type_of(schema: Schema) -> str:
    """The type of a value in a few words, with its bounds."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(type_of(option) for option in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"array of ({type_of(schema.get('items', {}))}){bounds(schema, 'Items')}"
    values = schema.get("additionalProperties")
    if kind == "object" and isinstance(values, dict):
        return f"object of ({type_of(values)}){bounds(schema, 'Properties')}"
    return kind + bounds(schema, "Length" if kind == "string" else "imum")


def bounds(schema: Schema, what: str) -> str:
    low, above = schema.get(f"min{what}"), schema.get("exclusiveMinimum")
    high, below = schema.get(f"max{what}"), schema.get("exclusiveMaximum")
    unit = {"Items": " items", "Length": " characters", "Properties": " keys", "imum": ""}[what]
    lower = f"({above:,}" if above is not None else f"[{low:,}" if low is not None else ""
    upper = f"{below:,})" if below is not None else f"{high:,}]" if high is not None else ""
    if lower and upper:
        return f" in {lower}, {upper}{unit}"
    if lower:
        return f" {'>' if above is not None else '≥'} {lower[1:]}{unit}"
    return f" {'<' if below is not None else '≤'} {upper[:-1]}{unit}" if upper else ""


def field(name: str, schema: Schema, required: bool) -> str:
    optional = not required and schema.get("default") is None
    kinds = [each for each in schema.get("anyOf", [schema]) if not optional or each.get("type") != "null"]
    note = schema.get("description")
    return "".join(
        (
            f"- `{name}{'?' if optional else ''}`: {' or '.join(map(type_of, kinds))}",
            "" if required or optional else f" = `{json.dumps(schema['default'])}`",
            f"; {note}" if note else "",
        )
    )


def fields(schema: Schema) -> list[str]:
    if "properties" not in schema:
        return [type_of(schema)]
    required = schema.get("required", ())
    return [field(name, each, name in required) for name, each in schema["properties"].items()]


MIN_SHARED = 5
"""Fewer lines that bodies share stand in each of them."""


def types() -> Iterator[str]:
    """A section for each type, and one for the fields that the same bodies have."""
    schemas: dict[str, Schema] = dict(description("", keys=True, admin=True)["components"]["schemas"])
    lines = {name: fields(schema) for name, schema in sorted(schemas.items())}
    users: dict[str, list[str]] = {}
    for name, of_type in lines.items():
        for line in of_type if name.endswith("Body") else ():
            users.setdefault(line, []).append(name)
    shared: dict[tuple[str, ...], list[str]] = {}
    for line, names in users.items():
        shared.setdefault(tuple(names), []).append(line)
    shared = {names: each for names, each in shared.items() if len(names) > 1 and len(each) >= MIN_SHARED}
    for name, of_type in lines.items():
        yield f"### {name}"
        if "description" in schemas[name]:
            yield prose(schemas[name]["description"])
        links = [f"[{title(names)}](#{anchor(title(names))})" for names in shared if name in names]
        if links:
            yield f"Also {', '.join(links)}."
        known = {line for names, each in shared.items() if name in names for line in each}
        yield "\n".join(line for line in of_type if line not in known)
    for names, each in shared.items():
        yield f"### {title(names)}"
        yield "\n".join(each)


def title(names: tuple[str, ...]) -> str:
    return f"Fields of {', '.join(names)}"


def anchor(heading: str) -> str:
    return heading.lower().replace(",", "").replace(" ", "-")


def endpoints() -> Iterator[str]:
    rows = []
    for operation in OPERATIONS:
        body, response = (
            "" if each is None else each if isinstance(each, str) else type_of({"$ref": each.__name__})
            for each in (operation.body, operation.response)
        )
        errors = "all" if operation.errors == REQUEST_ERRORS else ", ".join(map(str, operation.errors))
        notes = [note for note, holds in (("no key", operation.open), ("admin", operation.admin)) if holds]
        sent = " ".join(filter(None, (body, "→", response))) if body or response else ""
        sent += ", or events" if operation.streams else ""
        endpoint = f"`{operation.method.upper()} {operation.path}`"
        rows.append((endpoint, operation.summary, sent, errors, ", ".join(notes)))
    yield f"*All* errors are {', '.join(map(str, REQUEST_ERRORS))}."
    yield table(("endpoint", "what it does", "body → response", "errors", "note"), rows)


def refused() -> Iterator[str]:
    """One row for all fields that the same endpoints refuse in the same way."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for operation in OPERATIONS:
        for name, harmless in validation.REFUSED.get(operation.path, {}).items():
            accepted = ", ".join(f"`{json.dumps(value)}`" for value in harmless)
            remedy = prose(validation.REMEDIES.get(name, ""))
            where.setdefault((name, accepted, remedy), []).append(f"`{operation.path}`")
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (name, accepted, remedy), paths in sorted(where.items()):
        rows.setdefault((", ".join(paths), accepted, remedy), []).append(f"`{name}`")
    for paths, of_paths in groupby(sorted(rows), key=lambda row: row[0]):
        cells = [(", ".join(rows[row]), row[1], row[2]) for row in of_paths]
        yield f"**By {paths}**"
        yield table(("field", "accepted", "instead"), cells)


def suites() -> Iterator[str]:
    """The outcomes in `docs/suites.toml`."""
    for name, suite in tomllib.loads((HERE.parent / "suites.toml").read_text()).items():
        missed = sum(len(group["tests"]) for group in suite["not_passed"])
        passed, silent = len(suite["passed"]), sum(suite["silent"].values())
        asked = f"{passed + missed} tests asked the cluster, and {passed} of them passed"
        yield f"**{name} {suite['version']}**: {asked}. {silent} more tests of the same files ask no server."


def attempts() -> Iterator[str]:
    """The states of an attempt as a diagram, without the way to CLOSING."""
    edges = [(a, b, why) for a, after in TRANSITIONS.items() for b, why in after.items() if why != ENDS]
    drawn = [f"    {a.name} --> {b.name}: {why}" for a, b, why in edges]
    some = [f"    [*] --> {State.NEW.name}", *drawn, f"    {State.ENDED.name} --> [*]"]
    yield "\n".join(("```mermaid", "stateDiagram-v2", *some, "```"))
    yield f"From each state before {State.CLOSING.name} it goes there, too, when {ENDS}."


def terms() -> Iterator[str]:
    """The costs of a plan and their terms, from the docstrings of `placement` and `split`."""
    formulas, rows = dict[str, str](), list[tuple[str, str]]()
    for module in (placement, split):
        text, end = module.__doc__ or "", 0
        for formula in re.finditer(r"^    (\w[\w ]+?) +(= .*)$", text, re.M):
            formulas[formula[1]], end = formula[2], formula.end()
        rows += re.findall(r"^    (\S.*?)  +(\w.*(?:\n {8,}\S.*)*)$", text[end:], re.M)
    longest = max(map(len, formulas))
    yield "\n".join(("```text", *(f"{name:{longest}} {cost}" for name, cost in formulas.items()), "```"))
    yield table(("term", "meaning"), ((f"`{name}`", prose(meaning)) for name, meaning in rows))


BLOCKS = {
    "attempts": attempts,
    "terms": terms,
    "cli": cli,
    "advanced": advanced,
    "endpoints": endpoints,
    "types": types,
    "refused": refused,
    "suites": suites,
}


def pages() -> dict[str, str]:
    """File name → the page with new blocks, and the file of the chart."""

    def filled(block: re.Match[str]) -> str:
        return block[1] + "\n\n".join(BLOCKS[block[2]]()) + block[3]

    names = ("cli.md", "settings.md", "api.md", "../compatibility.md", "../architecture.md")
    return {name: BLOCK.sub(filled, (HERE / name).read_text()) for name in names} | {CHART: chart_options()}


if __name__ == "__main__":
    for file, text in pages().items():
        (HERE / file).write_text(text)
