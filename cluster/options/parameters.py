"""Turns option groups (dataclasses) into the parameters of typer commands, and back into argv.

An option is declared once, as a dataclass field:

    dtype: Annotated[Dtype, typer.Option(help="…")] = "auto"

Every command whose function takes the group then has the option: as the flag `--dtype`, as the environment
variable `BATON_DTYPE`, and as the key `dtype` of the `--config` file. The first of these wins. A field that
is itself a group adds the options of that group.

`to_argv` writes option groups as the flags of a child process.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from baton.cluster.options.refused import REFUSED

ENV_PREFIX = "BATON_"

# The names of every option and every command: one config file may serve all commands.
KNOWN: set[str] = set()
COMMANDS: set[str] = set()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


@cache
def _hints(group: type) -> dict[str, Any]:
    """The annotations of all fields. Evaluating them takes milliseconds, at each start of a role."""
    return get_type_hints(group, include_extras=True)


def option_of(group: type, field: Field[Any]) -> tuple[Any, OptionInfo | ArgumentInfo]:
    """The type and the typer metadata of an option field."""
    annotation = _hints(group)[field.name]
    assert get_origin(annotation) is Annotated, f"{group.__name__}.{field.name} has no typer.Option"
    type_, *metadata = get_args(annotation)
    [info] = [m for m in metadata if isinstance(m, OptionInfo | ArgumentInfo)]
    return type_, info


def default_of(field: Field[Any]) -> Any:
    """The default of an option; `Parameter.empty` for an argument that must be given."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _build(group: type, values: Mapping[str, Any]) -> Any:
    """An instance of `group`. `values` maps the names of its options, and of its inner groups' options."""
    hints = _hints(group)
    return group(
        **{
            field.name: _build(hints[field.name], values)
            if is_dataclass(hints[field.name])
            else values[field.name]
            for field in fields(group)
        }
    )


def _group_parameters(group: type) -> list[inspect.Parameter]:
    parameters: list[inspect.Parameter] = []
    for field in fields(group):
        if is_dataclass(inner := _hints(group)[field.name]):
            assert isinstance(inner, type)
            parameters += _group_parameters(inner)
            continue
        type_, declared = option_of(group, field)
        info = copy.copy(declared)
        if isinstance(info, ArgumentInfo):
            parameters.append(_parameter(field.name, default_of(field), type_, info))
            continue
        # typer takes the first name of an Annotated option from `default`.
        # A flag that may be None needs an opposite: None means that the user gave neither.
        opposite = f"/{flag('no_' + field.name)}" if type_ == bool | None else ""
        info.default = flag(field.name) + opposite
        info.envvar = env_name(field.name)
        info.show_envvar = False  # `baton --help` states the naming rule once
        info.rich_help_panel = info.rich_help_panel or getattr(group, "panel", None)
        parameters.append(_parameter(field.name, default_of(field), type_, info))
    return parameters


def _parameter(name: str, default: Any, type_: Any, info: ParameterInfo) -> inspect.Parameter:
    if info.show_default is True and default in (None, False, []):  # typer would show no default for these
        info.show_default = "off" if default is False else "none"
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_, info]
    )


def _config_parameter() -> inspect.Parameter:
    def load(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None:
            context.default_map = read_config(path, context.info_name or "")
        return path

    info = typer.Option(
        flag("config"),
        help="TOML file with values for these flags. A table such as \\[serve] wins over the top level.",
        envvar=env_name("config"),
        show_envvar=False,
        is_eager=True,
        callback=load,
        exists=True,
        dir_okay=False,
    )
    return _parameter("config", None, Path | None, info)


def _refused_parameters() -> list[inspect.Parameter]:
    """Hidden options for vLLM options that Baton lacks. Using one is an error that names the alternative."""

    def refusal(remedy: str) -> Callable[[Any], None]:
        def refuse(value: Any) -> None:
            if value not in (None, False):
                raise typer.BadParameter(f"Baton does not have this. {remedy}")

        return refuse

    parameters = []
    for name, (takes_value, remedy) in REFUSED.items():
        info = typer.Option(flag(name), hidden=True, callback=refusal(remedy))
        type_, default = (str | None, None) if takes_value else (bool, False)
        parameters.append(_parameter(name, default, type_, info))
    return parameters


def takes_options(command: Callable[..., Any], refuse: bool) -> Callable[..., Any]:
    """Turns a function whose parameters are option groups into a typer command.

    typer sees the fields of the groups as flat options. The function receives one instance of each group.
    With `refuse`, the command refuses vLLM options that Baton lacks by name.
    """
    hints = get_type_hints(command)
    groups: dict[str, type] = {name: hints[name] for name in inspect.signature(command).parameters}
    parameters = [p for group in groups.values() for p in _group_parameters(group)]
    KNOWN.update(p.name for p in parameters)
    COMMANDS.add(command.__name__)
    parameters = [_config_parameter(), *parameters, *(_refused_parameters() if refuse else ())]

    def run(**values: Any) -> Any:
        return command(**{name: _build(group, values) for name, group in groups.items()})

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def read_config(path: Path, command: str) -> dict[str, Any]:
    """Reads a TOML file into typer's default map for one command.

    Raises typer.BadParameter for invalid TOML and for a key that is no option of any command.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    sections = {name: table.pop(name) for name in COMMANDS & set(table) if isinstance(table[name], dict)}
    for where, section in (("", table), *((f"[{name}] ", sections[name]) for name in sorted(sections))):
        for key, value in section.items():
            name = key.replace("-", "_")
            if name not in KNOWN | set(REFUSED):
                close = _closest(name)
                hint = f"; did you mean {close.replace('_', '-')!r}?" if close else ""
                raise typer.BadParameter(f"{path}: unknown option {where}{key!r}{hint}")
            if not where or where == f"[{command}] ":
                values[name] = value
    return values


def _closest(name: str) -> str:
    """The option with the most similar name; "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(KNOWN), 1)), "")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning for each `BATON_*` variable that is no option."""
    # The secret has no flag, because every user of the machine can read arguments.
    known = {env_name(name) for name in (*KNOWN, "config", "cluster_secret")}
    lines = []
    for variable in sorted(set(environment) - known):
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in REFUSED:
            hint = REFUSED[name][1]
        else:
            hint = f"Did you mean {env_name(close)}?" if (close := _closest(name)) else ""
        lines.append(f"environment variable {variable} has no effect: it is no option. {hint}".rstrip())
    return lines


def to_argv(*groups: Any, **overrides: Any) -> list[str]:
    """The flags that pass option groups to another process. Options with their default value are left out.

    `overrides` are further flags by field name. They are written even with their default value, unless None.
    """
    values = {
        field.name: value
        for group in groups
        for field in fields(group)
        if (value := getattr(group, field.name)) != default_of(field)
    }
    argv: list[str] = []
    for name, value in {**values, **overrides}.items():
        if isinstance(value, bool):
            argv.append(flag(name if value else f"no_{name}"))
        elif isinstance(value, list | tuple):
            argv += [part for item in value for part in (flag(name), str(item))]
        elif value is not None:
            argv += [flag(name), str(value.absolute() if isinstance(value, Path) else value)]
    return argv


def role_environment(environment: Mapping[str, str], **values: str) -> dict[str, str]:
    """`environment` plus `values`, without `BATON_*` (the argv of a role is complete) and `RAY_*`."""
    kept = {k: v for k, v in environment.items() if not k.startswith((ENV_PREFIX, "RAY_"))}
    return kept | values
