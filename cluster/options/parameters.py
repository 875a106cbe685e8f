"""Turns option groups (dataclasses) into the parameters of typer commands, and back into argv.

An option is declared once, as a dataclass field:

    dtype: Dtype = opt("auto", "Type of weights and activations.")

Every command whose function takes the group then has the option: as the flag `--dtype`, as the environment
variable `BATON_DTYPE`, and as the key `dtype` of the `--config` file. The first of these wins. A field that
is itself a group adds the options of that group.

An option with `advanced=True` is no flag of `--help`. It is a key of the table `[advanced]` of the file, and
`--advanced.NAME`, as TOML spells that key. One with `hidden=True` is for child processes: a flag alone.

`to_argv` writes option groups as the flags of a child process.
"""

import copy
import difflib
import inspect
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

ENV_PREFIX = "BATON_"

ADVANCED_TABLE = "advanced"

REMOVED: dict[str, str] = {
    "trust_remote_code": "Baton never runs code from a model repository; use a supported model.",
    "pipeline_parallel_size": "Scale with --prefill and --decode instead.",
    "api_server_count": "Set the number of router processes with --router-processes.",
    "kv_transfer_config": "KV transfer is always on; see --kv-connector.",
    "kv_events_config": "Give each worker --advanced.kv-events-endpoint.",
    "swap_space": "A request without free blocks waits or moves; for cached KV in host memory use "
    "--host-cache-size.",
    "cpu_offload_gb": "Weights are never offloaded; use a smaller model or more memory.",
    "enforce_eager": "CUDA graphs cannot be switched off; CPUs use none.",
    "download_dir": "Set HF_HUB_CACHE, the variable of the hub's client.",
    "enable_auto_tool_choice": "Tool calls are always parsed; see --tool-call-parser.",
    "max_waiting_tokens": "Waiting requests are limited by their time: see --max-wait.",
    "hold_timeout": "It is three times --failure-timeout.",
    "transfer_timeout": "Give --failure-timeout.",
    "peer_timeout": "It is half of --failure-timeout.",
    "engine_timeout": "Give --failure-timeout.",
    "ttit_target": "Give --itl-target.",
    "kv_slot_bytes": "Give --advanced.kv-slot-size.",
    "max_body_bytes": "Give --advanced.max-body-size.",
    "check_port": "Every command that listens names a port that is taken, before it starts anything.",
    "enable_lora": "Give --lora-modules, or --advanced.max-loras for adapters that are loaded later.",
    "rates": "Give --rate to `baton bench sweep`.",
    "concurrencies": "Give --concurrency to `baton bench sweep`.",
    "arrivals": "Give --advanced.burstiness: 1 is Poisson, inf constant.",
    "preset": "Give --input-len and --output-len.",
    "once": "In a pipe `baton top` prints one frame and ends: `baton top | cat`.",
    "wide": "In a pipe all columns are shown: `baton status | less -S`.",
    "cluster": "Give --url: `baton doctor` then checks that cluster.",
    "input": "Give --input-len.",
    "output": "Give --output-len.",
    "cluster_certfile": "Give --cluster-ssl-certfile.",
    "cluster_keyfile": "Give --cluster-ssl-keyfile.",
    "cluster_ca_certs": "Give --cluster-ssl-ca-certs.",
}
"""Options of vLLM that Baton does not have, and earlier ones of Baton: name -> what to do instead.

Baton refuses them by name, because a user that copies a command line must learn which options have no
effect."""
# The names of the options of every command, and of every command: one config file may serve all commands.
KNOWN: set[str] = set()
ADVANCED: set[str] = set()
COMMANDS: set[str] = set()


# ------------------------------------------------------------ declaring options


def opt(
    default: Any,
    text: str,
    metavar: str | None = None,
    *,
    shown: str | bool = True,
    check: Callable[..., Any] | None = None,
    also: str | tuple[str, ...] = (),
    advanced: bool = False,
    **more: Any,
) -> Any:
    """A field that is an option. `shown` replaces its default in `--help`; `check` validates its value;
    `also` has further flags for it, which other servers have. `advanced`: it follows from something else, or
    few need it, so `--help` leaves it out.

    A choice needs no metavar: `--help` then lists its values."""
    option = typer.Option(help=text, metavar=metavar, show_default=shown, callback=check, **more)
    option.param_decls = (also,) if isinstance(also, str) else also or None
    return _declared(default, option, advanced=advanced)


advanced = partial(opt, advanced=True)


def argument(
    text: str, metavar: str | None = None, *, default: Any = MISSING, check: Callable[..., Any] | None = None
) -> Any:
    """A field that is an argument, which must be given if it has no default."""
    return _declared(default, typer.Argument(help=text, metavar=metavar, show_default=False, callback=check))


def _declared(default: Any, info: ParameterInfo, *, advanced: bool = False) -> Any:
    metadata = {"typer": info, "advanced": advanced}
    if isinstance(default, list):
        default = default.copy
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def directory(text: str, *, shown: str | bool = True, advanced: bool = False) -> Any:
    return opt(None, text, "DIR", shown=shown, advanced=advanced, file_okay=False)


def between(least: float, most: float = math.inf) -> Callable[[Any], Any]:
    """A check of a number's range. `--help` does not show it."""

    def check(number: Any) -> Any:
        if number is not None and not least <= number <= most:
            bound = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise typer.BadParameter(f"{number} is out of range: must be {bound}.")
        return number

    return check


_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size_in_bytes(value: str) -> int:
    """Bytes of a size such as `8GiB`. Raises `ValueError` for anything else."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]iB)?", value)
    if match is None:
        raise ValueError(f"{value!r} is not a size: give bytes, or a number with KiB, MiB, GiB or TiB")
    return int(match[1]) * _UNITS[match[2] or ""]


def check_size(value: str) -> str:
    try:
        size_in_bytes(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return value


PORT: dict[str, Any] = {"check": between(0, 65535)}
OLD_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
NO_ARGV = "Prefer BATON_API_KEY, which others cannot read."

# ------------------------------------------------------------ options as parameters of commands


def flag(name: str, *, advanced: bool = False) -> str:
    return f"--{f'{ADVANCED_TABLE}.' * advanced}{name.replace('_', '-')}"


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


@cache
def _hints(group: type) -> dict[str, Any]:
    """The annotations of all fields. Evaluating them takes milliseconds, at each start of a role."""
    return get_type_hints(group)


def default_of(each: Field[Any]) -> Any:
    """The default of an option; `Parameter.empty` for an argument that must be given."""
    if each.default_factory is not MISSING:
        return each.default_factory()
    return inspect.Parameter.empty if each.default is MISSING else each.default


def _build(group: type, values: Mapping[str, Any]) -> Any:
    """An instance of `group`. `values` maps the names of its options, and of its inner groups' options."""
    hints = _hints(group)
    return group(
        **{
            each.name: _build(hints[each.name], values)
            if is_dataclass(hints[each.name])
            else values[each.name]
            for each in fields(group)
        }
    )


def _options(group: type) -> Iterator[Field[Any]]:
    """The fields of a group that are options, also of its inner groups."""
    for each in fields(group):
        if is_dataclass(inner := _hints(group)[each.name]):
            assert isinstance(inner, type)
            yield from _options(inner)
        elif isinstance(each.metadata["typer"], OptionInfo):
            yield each


def group_parameters(group: type, *, variables: bool = True) -> list[inspect.Parameter]:
    """The parameters of a group. `variables`: each option is a variable, too."""
    parameters: list[inspect.Parameter] = []
    for each in fields(group):
        if is_dataclass(type_ := _hints(group)[each.name]):
            assert isinstance(type_, type)
            parameters += group_parameters(type_, variables=variables)
            continue
        info: OptionInfo | ArgumentInfo = copy.copy(each.metadata["typer"])
        if isinstance(info, ArgumentInfo):
            parameters.append(_parameter(each.name, default_of(each), type_, info))
            continue
        advanced = each.metadata["advanced"]
        # typer takes the first name of an Annotated option from `default`.
        # A flag that may be None needs an opposite: None means that the user gave neither.
        opposite = f"/{flag('no_' + each.name, advanced=advanced)}" if type_ == bool | None else ""
        info.default = flag(each.name, advanced=advanced) + opposite
        if variables and not info.hidden:
            info.envvar = env_name(each.name)
            info.show_envvar = False  # `baton --help` states the naming rule once
        info.hidden = info.hidden or advanced
        info.rich_help_panel = info.rich_help_panel or getattr(group, "panel", None)
        parameters.append(_parameter(each.name, default_of(each), type_, info))
    return parameters


def _parameter(name: str, default: Any, type_: Any, info: ParameterInfo) -> inspect.Parameter:
    if info.show_default is True and default in (None, "", False, []):  # typer would show no default
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


def remedy(given: str, flags: Collection[str]) -> str:
    """What to do instead of a flag that a command has not; "" if nothing is known. `flags`: those it has."""
    key = given.removeprefix("--")
    setting = flag(key, advanced=True)
    if setting in flags:
        file = f", or set it under [{ADVANCED_TABLE}] of --config" if "--config" in flags else ""
        return f"It is an advanced setting: give {setting}{file}."
    name = key.replace("-", "_")
    return f"Baton does not have this. {REMOVED[name]}" if name in REMOVED else ""


def takes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a function whose parameters are option groups into a typer command.

    typer sees the fields of the groups as flat options. The function receives one instance of each group.
    """
    hints = get_type_hints(command)
    groups: dict[str, type] = {name: hints[name] for name in inspect.signature(command).parameters}
    parameters = [p for group in groups.values() for p in group_parameters(group)]
    options = [each for group in groups.values() for each in _options(group)]
    KNOWN.update(each.name for each in options if not each.metadata["typer"].hidden)
    ADVANCED.update(each.name for each in options if each.metadata["advanced"])
    COMMANDS.add(command.__name__)
    parameters = [_config_parameter(), *parameters]

    def run(**values: Any) -> Any:
        for line in unknown_variables(os.environ):
            typer.secho(f"Warning: {line}", fg="yellow", err=True)
        return command(**{name: _build(group, values) for name, group in groups.items()})

    return with_clear_errors(run, command, parameters)


def with_clear_errors(
    run: Callable[..., Any], command: Callable[..., Any], parameters: Sequence[inspect.Parameter]
) -> Callable[..., Any]:
    """What typer calls for `command`: it has these parameters, and exits with the code that `run` returns.

    Shows a ValueError as one line without a traceback: in Baton it always means a user's mistake. The exit
    code is then 2, or the `exit_code` of the error.
    """

    def guarded(**values: Any) -> None:
        try:
            code = run(**values)
        except ValueError as error:
            typer.secho(f"Error: {error}", fg="red", err=True)
            raise typer.Exit(getattr(error, "exit_code", 2)) from error
        raise typer.Exit(code or 0)

    guarded.__name__ = command.__name__
    guarded.__doc__ = command.__doc__
    guarded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    guarded.__annotations__ = {p.name: p.annotation for p in parameters}
    return guarded


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
    for name, section in ("", table), *sorted(sections.items()):
        advanced = section.pop(ADVANCED_TABLE, {})
        if not isinstance(advanced, dict):
            raise typer.BadParameter(f"{path}: {ADVANCED_TABLE} must be a table")
        for keys, is_advanced in ((section, False), (advanced, True)):
            title = ".".join(filter(None, (name, ADVANCED_TABLE if is_advanced else "")))
            where = f"{path}: [{title}] " if title else f"{path}: "
            found = {_known(key, is_advanced, where): value for key, value in keys.items()}
            values |= found if name in ("", command) else {}
    return values


def _known(key: str, advanced: bool, where: str) -> str:
    """The option of a key of the file. Raises typer.BadParameter, which begins with `where`."""
    name = key.replace("-", "_")
    if name in REMOVED:
        raise typer.BadParameter(f"{where}{key!r}: Baton does not have this. {REMOVED[name]}")
    if name not in KNOWN:
        close = _closest(name)
        hint = f"; did you mean {close.replace('_', '-')!r}?" if close else ""
        raise typer.BadParameter(f"{where}unknown option {key!r}{hint}")
    if (name in ADVANCED) != advanced:
        belongs = "belongs under" if name in ADVANCED else "does not belong under"
        raise typer.BadParameter(f"{where}{key!r} {belongs} [{ADVANCED_TABLE}]")
    return name


def _closest(name: str) -> str:
    """The option with the most similar name; "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(KNOWN), 1)), "")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning for each `BATON_*` variable that is no option."""
    # The secret has no flag, because every user of the machine can read arguments.
    supported = {env_name(name) for name in (*KNOWN, "config", "cluster_secret")}
    lines = []
    for variable in sorted(set(environment) - supported):
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in REMOVED:
            hint = REMOVED[name]
        else:
            hint = f"Did you mean {env_name(close)}?" if (close := _closest(name)) else ""
        lines.append(f"environment variable {variable} has no effect: it is no option. {hint}".rstrip())
    return lines


def to_argv(*groups: Any) -> list[str]:
    """The flags that pass option groups to another process. Options with their default value are left out."""
    argv: list[str] = []
    for group in groups:
        for each in fields(group):
            name, value, advanced = each.name, getattr(group, each.name), each.metadata["advanced"]
            if value == default_of(each):
                continue
            if isinstance(value, bool):
                argv.append(flag(name if value else f"no_{name}", advanced=advanced))
            elif isinstance(value, list | tuple):
                argv += [part for item in value for part in (flag(name, advanced=advanced), str(item))]
            elif value is not None:
                text = str(value.absolute() if isinstance(value, Path) else value)
                argv += [flag(name, advanced=advanced), text]
    return argv


def role_environment(environment: Mapping[str, str], **values: str) -> dict[str, str]:
    """`environment` plus `values`, without `BATON_*` (the argv of a role is complete) and `RAY_*`."""
    inherited = {k: v for k, v in environment.items() if not k.startswith((ENV_PREFIX, "RAY_"))}
    return inherited | values
