"""`baton serve` looks at every port, key and certificate before it starts anything."""

import json
import re
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.bench.lab.harness.cluster import free_port
from baton.cluster import check_model, serve
from baton.cluster.cli import app
from baton.cluster.options.clients import DoctorOptions
from baton.cluster.options.engine import EngineOptions
from baton.cluster.options.roles import FrontOptions
from baton.cluster.supervision.blueprint import check_ports
from baton.cluster.tools.doctor.node import the_model
from baton.system.directories import make_directory


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flag, front in (
            ("--port", FrontOptions(port=port)),
            ("--grpc-port", FrontOptions(port=0, grpc_port=port)),
            ("--admin-port", FrontOptions(port=0, admin_port=port)),
        ):
            with pytest.raises(
                ValueError, match=rf"{flag} {port}: cannot listen on 127.0.0.1:{port}: the port is in use"
            ):
                check_ports(front)
    check_ports(FrontOptions(port=port, grpc_port=0, admin_port=0))


def test_the_same_port_given_twice_is_refused() -> None:
    port = free_port()
    with pytest.raises(ValueError, match=f"--admin-port {port}: cannot listen"):
        check_ports(FrontOptions(port=port, grpc_port=0, admin_port=port))


@pytest.mark.parametrize(
    ("front", "said"),
    [
        (FrontOptions(host="192.0.2.1", port=0), "--host 192.0.2.1: cannot listen there: no network"),
        (FrontOptions(host="a.invalid", port=0), "--host a.invalid: cannot listen there: it is no name"),
        (
            FrontOptions(port=0, admin_host="b.invalid", admin_port=0),
            "--advanced.admin-host b.invalid: cannot listen",
        ),
    ],
)
def test_an_address_of_another_machine_is_refused(front: FrontOptions, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_ports(front)


@pytest.mark.cases(1)
@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("command", ["stop", "restart"])
def test_an_address_without_ray_is_told_within_seconds(
    command: str, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would try for minutes. Another program may listen there."""
    monkeypatch.setattr("baton.cluster.on_ray.joined.REACHED_WITHIN", 0.5)
    monkeypatch.setattr("ray.init", None)  # it is not asked
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        result = CliRunner().invoke(app, [command, "--ray-address", address])
    assert result.exit_code == 2
    assert f"--ray-address {address}: no Ray cluster answers there; start one with" in result.stderr


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--engine", "vllm"], "--engine vllm: vLLM is not installed in this Python"),
        (["--engine", "vllm", "--itl-target", "50"], "vLLM is not installed"),
        (["--vllm-args", "--enforce-eager"], "--vllm-args and --advanced.vllm-untested: need --engine vllm"),
    ],
)
def test_vllm_and_its_options(flags: list[str], error: str, tmp_path: Path) -> None:
    """vLLM is in no environment of Baton's tests."""
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0", *flags])
    assert result.exit_code == 2
    assert error in " ".join(result.stderr.split())


EXPERTS = ("--prefill", "0", "--enable-expert-parallel", "--tensor-parallel-size")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--ssl-keyfile", "BROKEN"), "--ssl-certfile and --ssl-keyfile: some are missing"),
        (("--cluster-ssl-ca-certs", "BROKEN"), "--cluster-ssl-certfile and --cluster-ssl-keyfile"),
        (("--api-key-file", "BROKEN"), "[a]: Expected `str | null`, got `int` - at `$.key`"),
        (("--max-num-batched-tokens", "10"), "raise it to at least --max-num-seqs (64)"),
        (("--disk-cache-size", "1GiB"), "--disk-cache-size: needs --disk-cache-dir"),
        (("--allowed-origins", "chat.example"), "--allowed-origins must be * or an origin such as"),
        (("--prefill", "0", "--advanced.no-overflow"), "--advanced.no-overflow: without prefill workers"),
        (
            ("--advanced.generation-config", "gone"),
            "gone/generation_config.json cannot be read: No such file or",
        ),
        (
            ("--advanced.trace-dir", "/proc/self"),
            "--advanced.trace-dir /proc/self: No such file or directory; name a",
        ),
        (("--device", "3"), "--device '3': choose cpu, cuda or cuda:N"),
        (("--advanced.no-standby",), "--advanced.no-standby: only with --replace-engine; leave it out"),
        (
            ("--advanced.kv-slots", "7"),
            "--advanced.kv-slots: 7 is out of range (at least two for each of the 4 lanes",
        ),
        (("--quantization", "bitnet"), "'bitnet' is not one of 'auto', 'fp8', 'int4', 'none', 'gguf'"),
        (("--data-parallel-size", "2"), "--data-parallel-size 2: needs --engine vllm"),
        (("--encode", "1"), "the model takes no images, so leave out --encode and --advanced.encoder-pool"),
        (
            ("--advanced.encoder-pool",),
            "the model takes no images, so leave out --encode and --advanced.encoder-pool",
        ),
        ((*EXPERTS, "3"), "--enable-expert-parallel: the model has no experts"),
        ((*EXPERTS, "1"), "--enable-expert-parallel: needs --tensor-parallel-size above 1"),
    ],
)
def test_what_a_role_would_refuse_is_refused_before_the_start(
    flags: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve.LocalCluster, "run", None)  # nothing is started
    monkeypatch.setattr(check_model.spawn, "run", in_this_process)
    broken = tmp_path / "broken"
    broken.write_text("[a]\nkey = 7")
    given = [str(broken) if flag == "BROKEN" else flag for flag in flags]
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--device", "cpu", *given])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_a_log_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--log-dir .*file/logs: Not a directory; name a directory"):
        make_directory("--log-dir", tmp_path / "file" / "logs")


@pytest.mark.all
def test_an_unusable_model_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `baton serve` and by `baton doctor`, in the words of the worker and of the router."""
    (tmp_path / "config.json").write_text('{"architectures": ["NewForCausalLM"]}')
    monkeypatch.setattr(serve.LocalCluster, "run", None)  # nothing is started
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "architecture NewForCausalLM is not supported" in result.output
    checked = check_model._faults(str(tmp_path), dict(check_model.RANKS), None)
    monkeypatch.setattr(check_model, "faults", lambda found, engine: checked)
    found = list(the_model(DoctorOptions(model=str(tmp_path))))
    assert [(f.check, f.level) for f in found] == [("model", "bad"), ("tokenizer", "bad")]
    assert "NewForCausalLM is not supported" in found[0].found
    assert "has no tokenizer.json" in found[1].found


@pytest.mark.all
def test_a_group_that_does_not_fit_the_model_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By `baton serve` and by `baton doctor`, also for the embedded model."""
    monkeypatch.setattr(serve.LocalCluster, "run", None)  # nothing is started
    monkeypatch.setattr(check_model.spawn, "run", in_this_process)
    flags = ["--device", "cpu", "--prefill", "0", "--tensor-parallel-size", "2"]
    result = CliRunner().invoke(app, ["serve", "--port", "0", *flags])
    said = "--tensor-parallel-size 2: the model has 9 query heads and 3 KV heads; choose one of 1, 3, 9"
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
    [found] = the_model(DoctorOptions(tensor_parallel_size=2))
    assert (found.check, found.level, found.found) == ("model", "bad", said)
    assert found.remedy == "Choose another --tensor-parallel-size."
    [found] = the_model(DoctorOptions(tensor_parallel_size=3))
    assert (found.check, found.level) == ("model", "good")


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["prefill"], ["decode"]])
def test_more_tokens_than_the_context_are_refused_before_the_start(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "x" * 32)
    monkeypatch.setattr(serve.LocalCluster, "run", None)  # nothing is started
    monkeypatch.setattr("baton.worker.service_process.service.run", None)
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100, "rope_scaling": yarn}))
    for context, of in ((8192, []), (200, ["--model", str(tmp_path)])):
        flags = ["--device", "cpu", "--max-model-len", str(context + 1), *of]
        result = CliRunner().invoke(app, [*command, *flags], env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert result.stderr.strip() == (
            f"Error: --max-model-len {context + 1}: the model's context is {context} tokens; give at most "
            f"{context}, or leave the flag out"
        )


def test_pools_with_different_kv_dtypes_need_one_check_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check imports torch in a process of its own."""
    checked: list[EngineOptions] = []
    monkeypatch.setattr(serve.LocalCluster, "run", None)  # nothing is started
    monkeypatch.setattr(serve, "check_files", lambda found, engine, model: checked.append(engine))
    CliRunner().invoke(
        app, ["serve", "--port", "0", "--device", "cpu", "--advanced.decode-kv-cache-dtype", "fp8"]
    )
    assert len(checked) == 1


def in_this_process(*command: str) -> subprocess.CompletedProcess[str]:
    """What `check_model.faults` starts, without the time to import torch again."""
    found = [asdict(fault) for fault in check_model._faults(*json.loads(command[-1]))]
    return subprocess.CompletedProcess(command, 0, json.dumps(found))
