"""Turns functions that take option groups (dataclasses) into typer commands."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo


def flag(text: str, metavar: str | None = None, *aliases: str, shown: str | bool = True, **more: Any) -> Any:
    """A field of an option group: the flag `--field-name`, and its aliases. `shown` replaces the default."""
    return typer.Option(*aliases, help=text, metavar=metavar, show_default=shown, **more)


def takes_options(function: Callable[..., int]) -> Callable[..., None]:
    """Each parameter of `function` is an option group, or an ordinary typer parameter.

    `function` returns the exit code. A ValueError, also of a group's own checks, is a mistake of the user:
    the command prints it and exits with 2.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _parameters_of(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def command(**values: Any) -> None:
        try:
            built = {
                name: group(**{f.name: values.pop(f.name) for f in fields(group)})
                for name, group in groups.items()
            }
            code = function(**built, **values)
        except ValueError as error:
            typer.secho(f"Error: {error}", fg="red", err=True)
            raise typer.Exit(2) from error
        raise typer.Exit(code)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        type_, declared = get_args(hints[field.name])
        info: OptionInfo = copy.copy(declared)
        # typer takes the first name of an Annotated option from `default`.
        info.default = "--" + field.name.replace("_", "-")
        info.rich_help_panel = group.panel
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if info.show_default is True and default in (None, "", False, []):
            info.show_default = "off" if default is False else "none"
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_, info]
        )
