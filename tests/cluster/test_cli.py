"""The command line: what options exist, which source wins, what is refused, and what importing it costs."""

import errno
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import pytest
import typer
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

import baton.bench.load.cli
import baton.cluster.cli
import baton.cluster.roles
import baton.cluster.script
import baton.cluster.serve
from baton.cluster.cli import app
from baton.cluster.gpus import visible_gpus
from baton.cluster.options import clients, engine, pools, roles
from baton.cluster.options.parameters import flag
from baton.cluster.options.roles import FileOptions
from baton.cluster.supervision.blueprint import Blueprint, RoleName
from baton.cluster.supervision.role_process import RoleProcess
from baton.cluster.supervision.runner import RoleRunner
from baton.cluster.supervision.worker_group import command_of
from baton.engine import EngineConfig
from baton.engine.api.config import flag_of
from baton.router.config import RouterConfig
from baton.system.python_path import PACKAGES
from baton.worker.config import WorkerConfig


def run_baton(*args: str, **environment: str) -> Result:
    return CliRunner().invoke(app, args, env={"COLUMNS": "200", "NO_COLOR": "1", **environment})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Blueprint]:
    """What `baton serve` was about to run."""
    blueprints: list[Blueprint] = []

    def run(blueprint: Blueprint) -> int:
        blueprints.append(blueprint)
        return 0

    monkeypatch.setattr(baton.cluster.serve, "run", run)
    return blueprints


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(baton.cluster.roles, "run_worker", lambda *groups: calls.append(groups) or 0)
    return calls


@pytest.mark.all
@pytest.mark.parametrize("columns", [60, 80])
def test_help_cuts_no_flag_and_begins_with_examples(columns: int) -> None:
    width = {"COLUMNS": str(columns)}
    for application, prefix in ((app, ()), (baton.bench.load.cli.app, ("bench",))):
        group = typer.main.get_command(application)
        assert isinstance(group, TyperGroup)
        for name, command in group.commands.items():
            if isinstance(command, TyperGroup):
                continue
            shown = run_baton(*prefix, name, "--help", **width).output
            assert max(map(len, shown.splitlines())) <= columns
            assert "…" not in shown.replace("[NEW…]", "").replace("URL,…", "").replace("R,…", "").replace(
                "N,…", ""
            )
            assert shown.index("Examples") < shown.index("\nOptions\n")
            flags = {
                flag for each in command.params if not getattr(each, "hidden", False) for flag in each.opts
            }
            assert {flag for flag in flags if flag.startswith("--")} <= set(re.findall(r"--[\w-]+", shown))
    assert "kimi_k2" in run_baton("serve", "--help", **width).output, "values of a choice that is too long"


def options_of(command: Any, parent: click.Context | None, name: str) -> Iterator[tuple[str, str]]:
    """Each visible option, also of all commands below, and what `--help` says of it."""
    context = click.Context(command, parent, name)
    for below, found in getattr(command, "commands", {}).items():
        yield from options_of(found, context, below)
    for parameter in command.get_params(context):
        shown = parameter.get_help_record(context)
        of_typer = parameter.name in ("help", "version", "install_completion", "show_completion")
        if shown is not None and parameter.opts[0].startswith("--") and not of_typer:
            yield f"{context.command_path} {parameter.opts[0]}", shown[1]


@pytest.mark.parametrize("commands", [app, baton.bench.load.cli.app])
def test_help_shows_the_default_of_every_option(commands: typer.Typer) -> None:
    shown = dict(options_of(typer.main.get_command(commands), None, "baton"))
    assert len(shown) > 50
    assert [option for option, text in shown.items() if "default: " not in text] == []


def test_help_shows_the_values_of_every_choice() -> None:
    """A metavar would hide them."""
    named = [each for module in (clients, engine, pools, roles) for each in vars(module).values()]
    groups = [group for group in named if isinstance(group, type) and is_dataclass(group)]
    kinds = [(get_type_hints(group)[each.name], each) for group in groups for each in fields(group)]
    choices = {each.name: each.metadata["typer"] for kind, each in kinds if "Literal" in str(kind)}
    assert len(choices) > 15
    assert [name for name, info in choices.items() if info.metavar] == []


@pytest.mark.parametrize(
    ("role", "configurations", "under_other_names"),
    [
        (
            roles.WorkerRole,
            (WorkerConfig, EngineConfig),
            "vllm_args vllm_untested data_parallel_size optimize cluster_secret_file "
            "cluster_ssl_certfile cluster_ssl_keyfile cluster_ssl_ca_certs kv_slot_size "
            "failure_timeout no_standby",
        ),
        (
            roles.RouterRole,
            (RouterConfig,),
            "cluster_secret_file cluster_ssl_certfile cluster_ssl_keyfile cluster_ssl_ca_certs "
            "worker max_body_size kubernetes_service ssl_certfile ssl_keyfile ssl_ca_certs router_processes "
            "api_key admin_key_file batch_dir_size timeout_keep_alive no_overflow no_prefix_fetches "
            "no_access_log no_split_prompts",
        ),
    ],
)
def test_no_option_of_a_role_is_lost(
    role: type, configurations: tuple[type, ...], under_other_names: str
) -> None:
    """`baton.cluster.roles` passes options by their names, and those that are named here one by one."""
    given = [each.name for group in get_type_hints(role).values() for each in fields(group)]
    taken = {each.name for configuration in configurations for each in fields(configuration)}
    assert len(given) == len(set(given)), "a name in two groups"
    assert set(given) - taken == set(under_other_names.split())


def test_an_engine_names_advanced_settings_by_their_flags() -> None:
    names = {each.name for each in fields(EngineConfig)}
    given = [each for each in fields(engine.EngineOptions) if each.name in names]
    of_command = [flag(each.name, advanced=each.metadata["advanced"]) for each in given]
    assert [flag_of(each.name) for each in given] == of_command


def test_the_admin_key_is_in_a_file_or_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text("k3\n")
    key = roles.FrontOptions(admin_key="k3").key_of_admin()
    assert key is not None
    assert roles.FrontOptions(admin_key_file=file).key_of_admin() == key
    assert roles.FrontOptions().key_of_admin() is None
    with pytest.raises(ValueError, match=r"leave out --advanced\.admin-key and BATON_ADMIN_KEY"):
        roles.FrontOptions(admin_key="k3", admin_key_file=file).key_of_admin()
    file.write_text("\n")
    with pytest.raises(ValueError, match="cannot be empty"):
        roles.FrontOptions(admin_key_file=file).key_of_admin()
    file.unlink()
    with pytest.raises(ValueError, match=f"--admin-key-file {file}: No such file"):
        roles.FrontOptions(admin_key_file=file).key_of_admin()


def test_the_version_and_the_completion_of_a_shell() -> None:
    assert run_baton("--version").output.startswith("baton ")
    for words, expected in (
        ("baton serve --dtype fl", ["float32", "float16"]),
        ("baton bench re", ["replay"]),
        ("baton bench compare --fail", ["--fail-if"]),
    ):
        place = str(words.count(" "))
        asked = {"_BATON_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
        assert run_baton(**asked).output.split() == expected


def test_the_model_is_an_argument_or_an_option(served: list[Blueprint]) -> None:
    for args, environment in (
        (("serve", "a/b"), {}),
        (("serve", "a/b", "--port", "1"), {"BATON_MODEL": "c/d"}),
    ):
        assert run_baton(*args, **environment).exit_code == 0
        assert served.pop().model.model == "a/b"
    twice = run_baton("serve", "a/b", "--model", "a/b")
    assert twice.exit_code == 2
    assert "leave one out" in twice.output


def test_the_same_option_may_have_the_name_of_vllm(served: list[Blueprint]) -> None:
    assert run_baton("serve", "--num-gpu-blocks-override", "77").exit_code == 0
    assert served[0].engine.num_blocks == 77
    assert "--advanced.num-blocks 77" in " ".join(served[0].roles()[0].args)


def test_one_time_tells_failures_everywhere(served: list[Blueprint], started: list[Any]) -> None:
    run_baton("serve", "--failure-timeout", "20")
    specs = served[0].roles()
    assert {spec.patience for spec in specs} == {20.0}, "of the supervisor"
    run_baton("decode", *specs[1].args)
    deadlines = started[0].deadlines
    assert (deadlines.engine_dead, deadlines.progress, deadlines.peer_dead) == (20.0, 20.0, 10.0)
    assert deadlines.hold == deadlines.fetch_wait == 60.0


def test_the_tokenizer_reaches_every_role(
    served: list[Blueprint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "s" * 32)
    monkeypatch.chdir(tmp_path)
    Path("tok").mkdir()
    assert run_baton("serve", "--tokenizer", "tok").exit_code == 0
    started: list[Any] = []
    monkeypatch.setattr(
        "baton.worker.service_process.service.run", lambda config: started.append(config.engine) or 0
    )
    monkeypatch.setattr("baton.router.main", lambda config: started.append(config) or 0)
    for role in served[0].roles():
        more = ("--worker", "127.0.0.1:1") if role.role == "router" else ()
        result = run_baton(role.role, *role.args, *more)
        assert result.exit_code == 0, result.output
    assert [each.tokenizer for each in started] == [str(tmp_path / "tok")] * 3


@pytest.mark.parametrize(
    ("flags", "caching"),
    [
        ((), True),
        (("--no-enable-prefix-caching",), False),
    ],
)
def test_prefix_caching_is_on_by_default(
    flags: tuple[str, ...], caching: bool, served: list[Blueprint], started: list[Any]
) -> None:
    """Whether they are told directly or by `baton serve`."""
    run_baton("serve", *flags)
    passed_on = served[0].roles()[0].args
    for role in ("prefill", "decode"):
        for arguments in (flags, passed_on):
            assert run_baton(role, *arguments).exit_code == 0
    assert [(c.role, c.engine.enable_prefix_caching) for c in started] == [
        (role, caching) for role in ("prefill", "decode") for _ in range(2)
    ]


def test_serve_uses_the_option_names_of_vllm() -> None:
    output = run_baton("serve", "--help").output
    for each in (
        "--model", "--served-model-name", "--host", "--port", "--tensor-parallel-size", "--max-model-len",
        "--gpu-memory-utilization", "--max-num-seqs", "--max-num-batched-tokens", "--dtype",
        "--load-format", "--revision", "--chat-template", "--enable-prefix-caching", "--api-key",
    ):  # fmt: skip
        assert f"{each} " in output


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path, served: list[Blueprint]) -> None:
    file = tmp_path / "baton.toml"
    top = "port = 1001\nmax-num-seqs = 11\n[advanced]\nblock_size = 32\nkv-lanes = 5\n"
    file.write_text(top + "[serve.advanced]\nblock-size = 64\n[decode]\nport = 7\n")
    environment = {"BATON_PORT": "1002", "BATON_MAX_NUM_SEQS": "12"}
    result = run_baton("serve", "--config", str(file), "--port", "1003", **environment)
    assert result.exit_code == 0, result.output
    [blueprint] = served
    assert blueprint.front.port == 1003, "the flag"
    assert blueprint.engine.max_num_seqs == 12, "the environment"
    assert blueprint.engine.block_size == 64, "the file, the command's own table"
    assert blueprint.transfer.kv_lanes == 5, "an advanced setting"
    assert blueprint.engine.dtype == "auto", "the default"
    run_baton("serve", "--config", str(file))
    assert served[1].front.port == 1001, "not the table of another command"


def test_unknown_environment_variables_are_reported(served: list[Blueprint]) -> None:
    secret = {"BATON_CLUSTER_SECRET": "x" * 32, "BATON_CONFIG": os.devnull}
    result = run_baton(
        "serve", BATON_MAX_MODEL_LENGTH="4", BATON_ENFORCE_EAGER="1", BATON_TIMEOUT="5", **secret
    )
    assert result.exit_code == 0
    assert len(served) == 1, "they are no error: another program may use them"
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [
        "environment variable BATON_ENFORCE_EAGER has no effect",
        "environment variable BATON_MAX_MODEL_LENGTH has no effect",
        "environment variable BATON_TIMEOUT has no effect",
    ]
    assert "Did you mean BATON_MAX_MODEL_LEN?" in result.stderr
    assert "CUDA graphs cannot be switched off" in result.stderr
    assert run_baton("serve", BATON_PORT="0", **secret).stderr == ""


def test_lists_come_from_the_environment_and_the_file(tmp_path: Path, served: list[Blueprint]) -> None:
    run_baton("serve", BATON_API_KEY="one two")
    (tmp_path / "c.toml").write_text('api-key = ["three"]')
    run_baton("serve", BATON_CONFIG=str(tmp_path / "c.toml"))
    assert [blueprint.front.api_key for blueprint in served] == [["one", "two"], ["three"]]


@pytest.mark.parametrize(
    ("args", "environment", "words"),
    [
        (["--port", "many"], {}, ["--port", "whole number"]),
        (["--port", "70000"], {}, ["--port", "70000", "65535"]),
        (["--max-num-seqs", "0"], {}, ["--max-num-seqs", "at least 1"]),
        (["--dtype", "int4"], {}, ["--dtype", "int4", "bfloat16"]),
        (["--optimize", "speed"], {}, ["--optimize", "speed", "latency", "balanced", "throughput"]),
        (["--prefil", "2"], {}, ["--prefil", "--prefill"]),
        (["--tensor-parallel-size", "0"], {}, ["--tensor-parallel-size", "at least 1"]),
        (["--prefill", "3:2"], {}, ["--prefill", "3:2 begins above its end; write 2:3"]),
        (["--prefill", "0:2"], {}, ["--prefill", "0:2", "1:4"]),
        (["--prefill", "-1"], {}, ["--prefill", "-1", "1:4"]),
        (["--prefill", "5:-1"], {}, ["--prefill", "5:-1", "1:4"]),
        (["--decode", "0"], {}, ["--decode", "needs at least one worker"]),
        (["--enforce-eager"], {}, ["--enforce-eager", "CUDA graphs", "CPUs"]),
        (["--kv-lanes", "2"], {}, ["--kv-lanes", "give --advanced.kv-lanes"]),
        (["--no-elastic-memory"], {}, ["--no-elastic-memory", "give --advanced.no-elastic-memory"]),
        (["--advanced.kv-lane", "2"], {}, ["--advanced.kv-lane", "--advanced.kv-lanes"]),
        (["--hold-timeout", "2"], {}, ["--hold-timeout", "three times --failure-timeout"]),
        (["--trust-remote-code"], {}, ["--trust-remote-code", "never runs code"]),
        (["--config", "/nowhere.toml"], {}, ["--config", "/nowhere.toml"]),
        (["--chat-template", "/nowhere.jinja"], {}, ["--chat-template", "/nowhere.jinja"]),
        ([], {"BATON_PORT": "many"}, ["--port", "'many' is not a whole number"]),
        (["--ttft-target", "soon"], {}, ["--ttft-target", "'soon' is not a number of milliseconds"]),
        (["--dtype", "int9"], {}, ["'--dtype': 'int9' is not one of"]),
    ],
)
def test_errors_name_the_flag(
    args: list[str], environment: dict[str, str], words: list[str], served: list[Blueprint]
) -> None:
    result = run_baton("serve", *args, **environment)
    assert result.exit_code == 2
    assert served == []
    for word in words:
        assert word.lower() in result.output.lower()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench run --duration 5m", "'--duration': '5m' is not a number of seconds."),
        ("bench run --requests 1.5", "'1.5' is not a whole number."),
        ("bench sweep --api foo", "'--api': 'foo' is not one of 'completions', 'chat'."),
        ("router --request-timeout inf", "inf is out of range: must be 1 to 1000000."),  # 32 bits of ms
        ("picker --router here", "Error: --router must be IP:PORT or [IPV6]:PORT, not 'here'"),
        ("picker --router ::1:80", "Error: --router must be IP:PORT or [IPV6]:PORT, not '::1:80'"),
        ("plan --rate much", "'--rate': 'much' is not a number."),
        ("stop", "Error: --ray-address: required"),
        ("bench swep", "Did you mean 'sweep'?"),
    ],
)
def test_errors_of_other_commands(command: str, words: str) -> None:
    result = run_baton(*command.split())
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = ", ["TOML"]),
        ("prot = 8000", ["prot", "did you mean 'port'"]),
        ("[serve]\ndevise = 'cpu'", ["[serve] unknown option 'devise'", "device"]),
        ("kv-lanes = 2", ["'kv-lanes' belongs under [advanced]"]),
        ("[advanced]\nport = 2", ["[advanced] 'port' does not belong under [advanced]"]),
        ("[serve.advanced]\nkv-lane = 2", ["[serve.advanced] unknown option 'kv-lane'", "'kv-lanes'"]),
        ("advanced = 2", ["advanced must be a table"]),
        ("ttit-target = 20", ["'ttit-target'", "Give --itl-target"]),
        ("ready-fd = 3", ["unknown option 'ready-fd'"]),
        ("port = 'many'", ["--port", "'many' is not a whole number"]),
        ("speculative_config = 'eagle'", ["--speculative-config", "is not JSON"]),
        ("speculative_config = '{\"methods\": 1}'", ["--speculative-config", "'methods' is not one of"]),
    ],
)
def test_errors_in_the_file_name_the_field(
    tmp_path: Path, text: str, words: list[str], served: list[Blueprint]
) -> None:
    (tmp_path / "c.toml").write_text(text)
    result = run_baton("serve", "--config", str(tmp_path / "c.toml"))
    assert result.exit_code == 2
    assert served == []
    for word in words:
        assert word in result.output


def test_a_value_error_is_shown_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(blueprint: Blueprint) -> int:
        raise ValueError("--max-model-len 9: too short")

    monkeypatch.setattr(baton.cluster.serve, "run", run)
    result = run_baton("serve")
    assert result.exit_code == 2
    assert result.output.strip() == "Error: --max-model-len 9: too short"


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def write_a_report() -> None:
    raise OSError(errno.EDQUOT, "Disk quota exceeded", "report.json")


@pytest.mark.parametrize(
    ("command", "output", "where"),
    [(lambda: print("x"), FullDisk(), "the output"), (write_a_report, io.StringIO(), "report.json")],
)
def test_a_full_disk_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Callable[[], None],
    output: io.StringIO,
    where: str,
) -> None:
    monkeypatch.setattr(baton.cluster.cli, "app", command)
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit) as ended:
        baton.cluster.cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"Error: {where} cannot be written: ")


def test_the_script_opens_streams_that_are_closed() -> None:
    """A file that is opened later must not become the output of children."""
    code = "import os, sys, types; from baton.cluster import script; "
    code += "sys.modules['baton.cluster.cli'] = types.SimpleNamespace(main=lambda: print(1)); "
    code += "script.main(); assert os.open('/dev/zero', 0) > 2"
    command = f'exec "{sys.executable}" -c "{code}" <&- >&-'
    subprocess.run(["/bin/sh", "-c", command], check=True, env={"PYTHONPATH": PACKAGES})


def test_ctrl_c_before_the_command_runs_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by tests in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted() -> None:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        raise KeyboardInterrupt

    handlers = []
    found = signal.signal

    def noted(number: int, handler: Any) -> Any:
        handlers.append(handler)
        return found(number, handler)

    monkeypatch.setattr(baton.cluster.cli, "app", interrupted)
    monkeypatch.setattr(signal, "signal", noted)
    with pytest.raises(SystemExit) as ended:
        baton.cluster.script.main()
    assert ended.value.code == 130
    assert handlers == [signal.SIG_DFL, signal.default_int_handler], "while it imports"


def test_encoders_are_workers_and_the_others_then_have_none(
    served: list[Blueprint], started: list[Any]
) -> None:
    result = run_baton(
        "serve", "--encode", "2", "--device", "cpu", "--kv-store", "mooncake://127.0.0.1:1",
        "--replace-engine", "--speculative-config", '{"num_speculative_tokens": 3}',
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    roles = served[0].roles()
    assert [role.name for role in roles] == ["prefill 0", "decode 0", "encode 0", "encode 1", "router 0"]
    for role in roles[:-1]:
        result = run_baton(role.role, *role.args)
        assert result.exit_code == 0, result.output
    assert [config.role for config in started] == ["prefill", "decode", "encode", "encode"]
    assert [config.engine.encoder_pool for config in started] == [True, True, False, False]
    for encoder in started[2:]:
        assert encoder.engine_module == "baton.encode_worker.process"
        assert encoder.kv_store is None
        assert not encoder.replace_engine
        assert not encoder.engine.enable_prefix_caching
    run_baton("serve", "--device", "cpu")
    assert "--advanced.encoder-pool" not in served[1].roles()[0].args


def test_an_encoder_takes_the_flags_of_all_roles(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On Kubernetes these are variables of all pods."""
    monkeypatch.setenv("BATON_KV_STORE", "mooncake://127.0.0.1:1")
    flags = [
        "--advanced.encoder-pool",
        "--tensor-parallel-size",
        "2",
        "--disk-cache-size",
        "1GiB",
        "--kv-connector",
    ]
    result = run_baton("encode", "--device", "cpu", *flags, "nixl")
    assert result.exit_code == 0, result.output
    [config] = started
    assert (config.kv_store, config.kv_connector) == (None, "auto")
    assert (config.engine.tensor_parallel_size, config.engine.disk_cache_size) == (1, 0)
    assert not config.engine.encoder_pool
    for refused in (["--language-model-only"], ["--engine", "vllm"]):
        result = run_baton("encode", "--device", "cpu", *refused)
        assert result.exit_code == 2
        assert refused[0] in result.output


def test_roles_accept_the_arguments_that_serve_passes(
    served: list[Blueprint], workers: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_CLUSTER_SECRET", raising=False)
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    run_baton(
        "serve", "--dtype", "float32", "--advanced.block-size", "32", "--enable-prefix-caching",
        "--advanced.kv-lanes", "2", "--drain-timeout", "5", "--advanced.trace-dir", str(tmp_path / "traces"),
        "--api-key", "k1", "--api-key", "k2", "--advanced.admin-key", "k3", "--advanced.num-threads", "3",
        "--device", "cpu", "--cluster-secret-file", str(secret), "--decode", "2",
        "--log-format", "json", "--advanced.otlp-endpoint", "http://127.0.0.1:4317",
    )  # fmt: skip
    [blueprint] = served
    roles = blueprint.roles()
    assert [role.name for role in roles] == ["prefill 0", "decode 0", "decode 1", "router 0"]
    assert all(role.environment["BATON_CLUSTER_SECRET"] == "s" * 32 for role in roles)
    assert roles[-1].environment["BATON_API_KEY"] == "k1 k2"
    assert roles[-1].environment["BATON_ADMIN_KEY"] == "k3"
    assert not any("BATON_ADMIN_KEY" in role.environment for role in roles[:-1])
    assert not any("k1" in arg or "k3" in arg or "s" * 32 in arg for role in roles for arg in role.args)
    # Ray stores the arguments of actors: they name the secret, and where it is.
    on_ray = replace(blueprint, ray=replace(blueprint.ray, ray_address="10.0.0.1:6379"))
    with pytest.raises(ValueError, match=r"--api-key, BATON_API_KEY: Ray stores .* --api-key-file"):
        on_ray.roles()
    on_ray = replace(on_ray, front=replace(blueprint.front, api_key=[]))
    with pytest.raises(
        ValueError, match=r"--advanced.admin-key, BATON_ADMIN_KEY: Ray stores .* --admin-key-file"
    ):
        on_ray.roles()
    on_ray = replace(on_ray, front=replace(on_ray.front, admin_key=None))
    before = on_ray.roles()
    assert b"s" * 32 not in pickle.dumps(before)
    assert {role.secret for role in before} == {b"s" * 32}
    secret.write_text("t" * 32)
    assert on_ray.roles() != before, "it is another cluster"
    alone = replace(on_ray, secret=replace(blueprint.secret, cluster_secret_file=None))
    with pytest.raises(ValueError, match=r"--ray-address: .* need the cluster secret"):
        alone.roles()
    result = run_baton("decode", *roles[1].args, "--index", "1")
    assert result.exit_code == 0, result.output
    [(name, given)] = workers
    assert (name, given.process.index) == ("decode", 1)
    for group in ("engine", "transfer", "deadlines", "drain", "files", "observe"):
        assert getattr(given, group) == getattr(blueprint, group)
    assert given.model.served_model_name == ["SmolLM2-135M-Instruct"]
    assert Path(given.model.model).is_file()


def test_each_role_parses_all_that_its_supervisor_gives(
    served: list[Blueprint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the flags that are added on its machine, where no option of `baton serve` has them."""
    run_baton("serve", "--device", "cpu", "--encode", "1", "--kv-store", "local")
    [blueprint] = served
    roles = blueprint.roles()
    assert {role.role for role in roles} == {*get_args(RoleName)}
    commands = list[list[str]]()
    monkeypatch.setattr(RoleProcess, "__init__", lambda _, command, *more: commands.append(command))
    for role in roles:
        RoleRunner(role, tmp_path, program=())
        RoleRunner(role, tmp_path, peer="127.0.0.1:6379", program=())  # on Ray
    group = blueprint.worker("decode")
    group = replace(group, engine=replace(group.engine, data_parallel_size=2), files=FileOptions(tmp_path))
    commands += ([*command_of("decode", group, rank, ()), "--group", "{}"] for rank in range(2))
    application = typer.main.get_command(app)
    assert isinstance(application, TyperGroup)
    for name, *flags in commands:
        context = application.commands[name].make_context(name, [*flags, "--ready-fd", "3"])
        assert context.params["ready_fd"] == 3
        assert context.params.get("run_dir") == (None if name in ("router", "store") else tmp_path), name


def test_the_opentelemetry_variable_is_the_default_of_the_flag(
    served: list[Blueprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://env:4317")
    run_baton("serve", "--device", "cpu")
    run_baton("serve", "--device", "cpu", "--advanced.otlp-endpoint", "http://flag:4317")
    for blueprint, endpoint in zip(served, ("http://env:4317", "http://flag:4317"), strict=True):
        for role in blueprint.roles():
            assert role.args[role.args.index("--advanced.otlp-endpoint") + 1] == endpoint


def test_engines_share_the_cpus(served: list[Blueprint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.cluster.supervision.blueprint.usable_cpus", lambda: 8)
    run_baton("serve", "--device", "cpu", "--prefill", "1", "--decode", "2")
    run_baton("serve", "--device", "cpu", "--prefill", "9", "--decode", "9")
    assert [role.cpus for role in served[0].roles()] == [2, 2, 2, 1]
    assert {role.cpus for role in served[1].roles()} == {1}


def test_a_worker_alone_takes_what_other_engines_leave(
    started: list[WorkerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cluster.roles.share_of_cpus", lambda worker: 3)
    for flags in ((), ("--advanced.num-threads", "5")):
        run_baton("prefill", "--device", "cpu", *flags)
    assert [config.engine.num_threads for config in started] == [3, 5]


def test_pools_and_their_places(served: list[Blueprint], tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        "prefill = 2\ndecode = '1:3'\n[advanced]\nplacement = 'pack'\nprefill-nodes = ['gpu=h200', 'zone=a']"
    )
    run_baton("serve", "--config", str(config), "--device", "cuda")
    run_baton("serve", "--advanced.placement", "pair", "--prefill", "2", "--decode", "3")
    [blueprint, pairs] = served
    roles = blueprint.roles()
    assert [role.name for role in roles] == ["prefill 0", "prefill 1", "decode 0", "router 0"]
    assert [role.gpus for role in roles] == [1, 1, 1, 0]
    assert [role.placement for role in roles[:3]] == ["pack"] * 3
    assert [role.labels for role in roles[1:3]] == [{"gpu": "h200", "zone": "a"}, {}]
    assert [role.name for role in pairs.roles() if role.placement == "pair"] == [
        "prefill 0", "prefill 1", "decode 0", "decode 1",
    ]  # fmt: skip


ONE = ("prefill 0", 1, 1)
MIXED = "--prefill-tensor-parallel-size 2"
TWO = "--prefill 0 --tensor-parallel-size 2 --decode"


@pytest.mark.parametrize(
    ("flags", "workers"),
    [
        ("--prefill 2 --decode 1:2", [ONE, ("prefill 1", 1, 1), ("decode 0", 1, 1)]),
        (f"{TWO} 2", [("decode 0", 2, 2), ("decode 1", 2, 2)]),
        (f"{MIXED} --decode 2", [("prefill 0", 2, 2), ("decode 0", 1, 1), ("decode 1", 1, 1)]),
        ("--prefill 2 --decode 1:3", "--prefill 2 --decode 1:3.* 5 GPUs, but this machine has 4"),
        (
            f"{TWO} 3",
            "--prefill 0 --decode 3 --tensor-parallel-size 2: .* 6 GPUs, .* has 4; .*lower --tensor-parallel",
        ),
        (
            f"{MIXED} --decode 3",
            f"--prefill 1 --decode 3 {MIXED}: .* 5 GPUs.*, lower --prefill-tensor-par",
        ),
        # A flip may bring a second worker of two GPUs.
        (f"{MIXED} --prefill 1:2 --decode 1:2", "need 8 GPUs"),
    ],
)
def test_the_gpus_and_cores_of_workers(
    flags: str,
    workers: list[tuple[str, int, int]] | str,
    served: list[Blueprint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present = ["0", "1", "2", "3"]
    monkeypatch.setattr("baton.cluster.supervision.blueprint.visible_gpus", lambda: present)
    run_baton("serve", "--device", "cuda", *flags.split())
    roles = served[0].roles()
    if isinstance(workers, str):
        with pytest.raises(ValueError, match=workers):
            served[0].gpus(roles)
    else:
        assert [(role.name, role.gpus, role.cpus) for role in roles[:-1]] == workers
        assert served[0].gpus(roles) == present


def test_workers_on_cpus_need_no_gpus(served: list[Blueprint]) -> None:
    run_baton("serve", "--device", "cpu", "--prefill", "9")
    assert served[0].gpus(served[0].roles()) == visible_gpus()


def test_a_pool_may_have_ranks_and_experts_of_its_own(served: list[Blueprint]) -> None:
    run_baton("serve", "--device", "cuda", *MIXED.split(), "--enable-expert-parallel")
    workers = served[0].roles()[:-1]
    flag = "--tensor-parallel-size"
    assert [role.args[role.args.index(flag) + 1] for role in workers if flag in role.args] == ["2"]
    assert ["--enable-expert-parallel" in role.args for role in workers] == [True, False]


def test_pools_may_have_different_kv_dtypes(served: list[Blueprint]) -> None:
    flag = "--kv-cache-dtype"
    for flags, expected in (
        (("--kv-cache-dtype", "fp8"), ["fp8", "fp8"]),
        (("--advanced.decode-kv-cache-dtype", "fp8"), [None, "fp8"]),
        (("--kv-cache-dtype", "fp8", "--advanced.prefill-kv-cache-dtype", "auto"), [None, "fp8"]),
    ):
        run_baton("serve", "--device", "cpu", *flags)
        args = [role.args for role in served[-1].roles()[:-1]]
        assert [given[given.index(flag) + 1] if flag in given else None for given in args] == expected


def test_only_the_prefill_pool_may_be_left_out(
    served: list[Blueprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    routers: list[roles.RouterRole] = []
    monkeypatch.setattr(baton.cluster.roles, "run_router", lambda given: routers.append(given) or 0)
    for prefill, names in (("0", ["decode 0"]), ("1", ["prefill 0", "decode 0"])):
        run_baton("serve", "--prefill", prefill, "--device", "cpu")
        [*workers, router] = served[-1].roles()
        assert [role.name for role in workers] == names
        result = run_baton("router", *router.args)
        assert result.exit_code == 0, result.output
    assert [given.membership.decode_only for given in routers] == [True, False]


@pytest.mark.parametrize(
    ("devices", "chosen", "shown"),
    [
        (("nvidia0", "nvidia3", "nvidiactl"), None, ["0", "1"]),  # CUDA counts those that it sees
        (("nvidia0", "nvidia1"), "1", ["1"]),
        (("nvidia0", "nvidia1"), "GPU-5a, GPU-7b", ["GPU-5a", "GPU-7b"]),
        (("nvidia0",), "", []),
        (("nvidia0",), "-1", []),
        ((), "0", []),
    ],
)
def test_gpus_that_a_role_may_be_given(
    devices: tuple[str, ...],
    chosen: str | None,
    shown: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device in devices:
        (tmp_path / device).touch()
    monkeypatch.setattr("baton.cluster.gpus.Path", lambda path: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--advanced.placement", "pair", "--decode", "1:2"), "--advanced.placement pair"),
        (("--advanced.prefill-nodes", "gpu"), "--advanced.prefill-nodes gpu: must have the form KEY=VALUE"),
    ],
)
def test_invalid_placements_are_refused(flags: tuple[str, ...], words: str, served: list[Blueprint]) -> None:
    run_baton("serve", *flags)
    with pytest.raises(ValueError, match=words):
        served[0].roles()


def imports(*args: str, blocked: str = "") -> set[str]:
    """The top-level modules that a command has imported when it ends."""
    script = f"""
import json, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked.split()!r}:
            raise ImportError(f"{{name}} is not installed")
sys.meta_path.insert(0, Blocker())
from baton.cluster.cli import app
try:
    app({list(args)!r})
except SystemExit as end:
    print(json.dumps([end.code, sorted({{name.partition(".")[0] for name in sys.modules}})]), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": PACKAGES, "PATH": "", "HOME": "/nonexistent"},
        check=True,
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code in (0, 2), done.stderr
    return set(modules)


@pytest.mark.all
@pytest.mark.parametrize(
    "args", [("--help",), ("serve", "--help"), ("status", "--url", "http://127.0.0.1:9")]
)
def test_quick_commands_import_no_heavy_modules(args: tuple[str, ...]) -> None:
    assert not imports(*args) & {"torch", "ray", "transformers", "grpc", "numpy"}


def test_the_script_imports_little_before_it_handles_ctrl_c() -> None:
    """Until then Python prints a traceback."""
    code = "import sys; before = {*sys.modules}; import baton.cluster.script; print(*{*sys.modules} - before)"
    environment = {"PYTHONPATH": PACKAGES}
    found = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).split()
    assert "baton.cluster.script" in found
    assert not {"importlib.metadata", "email", "typer"} & {*found}, "they take most of its time"
