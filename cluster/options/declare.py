"""Helpers to declare options."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import typer
from typer.models import OptionInfo


def opt(
    text: str,
    metavar: str | None = None,
    *,
    shown: str | bool = True,
    check: Callable[[Any], Any] | None = None,
    also: str | None = None,
    **more: Any,
) -> OptionInfo:
    """A typer option. `shown` replaces its default in `--help`; `check` validates its value; `also` is a
    second flag for it, which another server has.

    A choice needs no metavar: `--help` then lists its values."""
    option = typer.Option(help=text, metavar=metavar, show_default=shown, callback=check, **more)
    option.param_decls = None if also is None else (also,)
    return option


def directory(text: str, *, shown: str | bool = True) -> OptionInfo:
    return opt(text, "DIR", shown=shown, file_okay=False)


def between(least: float, most: float = math.inf) -> Callable[[Any], Any]:
    """A check of a number's range. typer's own `min` and `max` would widen the columns of `--help`."""

    def check(value: Any) -> Any:
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise typer.BadParameter(f"{value} is out of range: must be {bound}.")
        return value

    return check


_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size_in_bytes(value: str) -> int:
    """Bytes of a size such as `8GiB`. Raises `ValueError` for anything else."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]iB)?", value)
    if found is None:
        raise ValueError(f"{value!r} is not a size: give bytes, or a number with KiB, MiB, GiB or TiB")
    return int(found[1]) * _UNITS[found[2] or ""]


def check_size(value: str) -> str:
    """A check of a size."""
    try:
        size_in_bytes(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return value


PORT: dict[str, Any] = {"check": between(0, 65535)}
OLD_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
NO_ARGV = "Prefer BATON_API_KEY: every user of the machine can read arguments."
