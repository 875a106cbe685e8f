"""Makes typer commands of functions that take dataclasses: every field annotated with a typer.Option is a
flag.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer


def takes_options(function: Callable[..., int]) -> Callable[..., None]:
    """`function`'s parameters are dataclasses, whose fields become flat options, or ordinary typer
    parameters.

    What it returns is the exit code. A ValueError, also one of a dataclass's own checks, is the user's: a
    line that names value and remedy, and exit code 2.
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


def _parameters_of(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    found = []
    for field in fields(group):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=hints[field.name],
            )
        )
    return found
