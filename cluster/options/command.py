"""A command of `baton`: its `--help`, which cuts no flag however narrow the terminal is, and its errors."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from baton.cluster.options.parameters import flag, remedy

INDENT = 2
UNITS = {"S": " of seconds", "SECONDS": " of seconds", "MS": " of milliseconds"}
FLAGS = 30  # columns of flags; a longer flag has a line of its own


class Command(TyperCommand):
    """A command with examples, one a line of its `epilog`. They stand at the beginning of its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _reworded(error)
            raise
        except typer.TyperException as error:
            given = getattr(error, "option_name", "")  # that this command has not
            flags = {
                each for parameter in self.params for each in (*parameter.opts, *parameter.secondary_opts)
            }
            if text := remedy(given, flags):
                raise typer.BadParameter(text, ctx, param_hint=given) from error
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        page = Console(highlight=False)
        usage = " ".join(self.collect_usage_pieces(ctx))
        page.print(Text.assemble(("Usage: ", "bold"), f"{ctx.command_path} {usage}"))
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            page.print()
            page.print(Text.from_markup(" ".join(paragraph.split())))
        if self.epilog:
            page.print(Text("\nExamples", "bold"))
            for line in self.epilog.splitlines():
                page.print(Text(_example(line, page.width), "cyan"), soft_wrap=True)
        for title, records in self._panels(ctx).items():
            page.print(Text(f"\n{title}", "bold"))
            for record in records:
                for line in _described(*record, page):
                    page.print(line, soft_wrap=True)
        if any(each.metavar in ("S", "MS", "SIZE") for each in self.params):
            units = "S are seconds, MS milliseconds. A SIZE is in bytes, or has a unit: 64KiB, 16MiB, 8GiB."
            page.print(Text(f"\n{units}"))
        if any(each.opts[0].startswith(flag("", advanced=True)) for each in self.params):
            page.print(
                Text(f"\nAdvanced settings ({flag('NAME', advanced=True)}): docs/reference/settings.md")
            )

    def _panels(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Flags and text of each parameter, by its panel. The flags that all commands have come last."""
        panels: dict[str, list[tuple[str, str]]] = {}
        general: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            panel = getattr(parameter, "rich_help_panel", None)
            if panel is None and parameter.param_type_name == "argument":
                panel = "Arguments"
            (general if panel is None else panels.setdefault(panel, [])).append(record)
        return panels | {"Options": general}


def _reworded(error: typer.BadParameter) -> str:
    """The message, with the value that was given, in words that do not presume a library."""
    errors = getattr(error.__cause__, "errors", None)
    if errors is None:
        return error.message
    kind, value = errors()[0]["type"], str(errors()[0]["input"])
    if kind.startswith(("int_", "float_")):
        number = "a whole number" if kind.startswith("int_") else "a number"
        unit = UNITS.get(getattr(error.param, "metavar", ""), "")
        return f"{value!r} is not {number}{unit}."
    text = error.message.removeprefix("Value error, ")
    return text if value in text else f"{text}, not {value!r}"


def _described(flags: str, text: str, page: Console) -> Iterator[Text]:
    """The lines of a parameter: its flags beside the text, or above it if they are long."""
    meaning, bracket, facts = text.partition("  [")
    names, _, values = flags.partition(" <")
    if "|" in values and len(flags) > page.width - INDENT:  # its values are text that can be wrapped
        flags = f"{names} NAME"
        meaning += f" One of {', '.join(values.removesuffix('>').split('|'))}."
    paragraph = Text.from_markup(meaning)
    if bracket:
        paragraph.append(" [" + re.sub(r"default: \((.*)\)]$", r"default: \1]", facts), "dim")
    lines = paragraph.wrap(page, page.width - FLAGS)
    heading = Text.assemble(" " * INDENT, (flags, "cyan"))
    if heading.cell_len < FLAGS:
        heading.pad_right(FLAGS - heading.cell_len)
        yield heading + lines.pop(0)
    else:
        yield from heading.wrap(page, page.width)
    for line in lines:
        line.pad_left(FLAGS)
        yield line


def _example(command: str, width: int) -> str:
    """A command as a shell takes it, in lines that fit. No line breaks within quotes."""
    lines, room = [""], width - INDENT - len(" \\")
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|\S)+""", command):
        if len(lines[-1]) + 1 + len(word) > room and lines[-1]:
            lines.append(" " * INDENT)
        lines[-1] += f" {word}" if lines[-1].strip() else word
    return textwrap.indent(" \\\n".join(lines), " " * INDENT)
