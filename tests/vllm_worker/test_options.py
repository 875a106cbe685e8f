"""vLLM's command line from the options of a worker, and its version."""

import json
import os
import subprocess
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.engine import EngineConfig, SpeculativeConfig
from baton.vllm_worker.options import command_line, computes_other_kv, engine_args
from baton.vllm_worker.transfer_process import Settings
from baton.vllm_worker.version import check_version
from baton.worker.group import Group
from tests.vllm_worker.engines import PATHS, PYTHON

pytestmark = pytest.mark.all


def config(**fields: Any) -> EngineConfig:
    return EngineConfig("some/model", **fields)


def test_options_have_vllms_names() -> None:
    line = command_line(
        config(num_blocks=50, max_num_seqs=3, enable_prefix_caching=True, load_format="dummy", device="cuda"),
        ["--enforce-eager"],
    )
    pairs = dict(pairwise(line))
    assert pairs["--model"] == "some/model"
    assert pairs["--num-gpu-blocks-override"] == "50"
    assert pairs["--max-num-seqs"] == "3"
    assert pairs["--load-format"] == "dummy"
    assert "--enable-prefix-caching" in line
    assert pairs["--mm-processor-cache-gb"] == "0"
    assert line[-1] == "--enforce-eager"
    assert not {"--max-model-len", "--quantization", "--block-size", "--device"} & set(line)
    assert "--no-enable-prefix-caching" in command_line(config(), ())


def test_drafts_have_vllms_form() -> None:
    def given(**fields: Any) -> Any:
        drafts = SpeculativeConfig(num_speculative_tokens=2, **fields)
        return json.loads(dict(pairwise(command_line(config(speculative_config=drafts), ())))[option])

    option = "--speculative-config"
    two = {"num_speculative_tokens": 2}
    assert given() == {"method": "ngram", **two, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    assert given(method="eagle3", model="a/head") == {"method": "eagle3", **two, "model": "a/head"}
    assert given(method="mtp") == {"method": "mtp", **two}
    other = '--speculative-config {"method":"suffix"}'
    assert engine_args(config(), other)
    with pytest.raises(ValueError, match="it is also in --vllm-args; give it once"):
        engine_args(config(speculative_config=SpeculativeConfig()), other)


def test_there_is_room_for_the_adapters_of_the_start() -> None:
    assert "--enable-lora" not in command_line(config(), ())
    assert "--language-model-only" in command_line(config(language_model_only=True), ())
    two = config(lora_modules=("a=/a", "b=/b=c"), max_lora_rank=64)
    assert two.adapters == {"a": "/a", "b": "/b=c"}
    pairs = dict(pairwise(command_line(two, ())))
    assert (pairs["--max-loras"], pairs["--max-lora-rank"]) == ("2", "64")
    assert dict(pairwise(command_line(config(max_loras=5), ())))["--max-loras"] == "5"
    one = dict(pairwise(command_line(replace(two, max_loras=1), ())))
    assert (one["--max-loras"], one["--max-cpu-loras"]) == ("1", "2"), "all of the start are loaded"
    more = dict(pairwise(command_line(replace(two, max_cpu_loras=8), ())))
    assert (more["--max-loras"], more["--max-cpu-loras"]) == ("2", "8")
    for few in (replace(two, max_loras=3), replace(two, lora_modules=("a=/a", "b=/b", "c=/c"))):
        with pytest.raises(ValueError, match=r"--advanced.max-cpu-loras 2: .* raise it to at least 3"):
            replace(few, max_cpu_loras=2)
    assert "--enable-lora" in command_line(config(max_lora_rank=8), ()), "all of them are loaded later"
    for wrong in (("a",), ("=a",), ("a=",), ("a=/a", "a=/b")):
        with pytest.raises(ValueError, match="give NAME=PATH, with a name for each adapter"):
            config(lora_modules=wrong)


@pytest.mark.parametrize(
    "given", ["--enforce-eager", "--cudagraph-capture-sizes 1 2", '--compilation-config={"mode": 0}', "-O0"]
)
def test_steps_with_chunks_have_graphs_unless_the_user_says_which(given: str) -> None:
    option, user = "--compilation-config", given.split()
    graphs = json.loads(dict(pairwise(command_line(config(device="cuda"), ["--swap-space", "4"])))[option])
    assert graphs == {"cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}
    assert option not in command_line(config(device="cuda"), user)[: -len(user)]
    assert option not in command_line(config(device="cpu"), ())


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"host_cache_size": 1 << 30, "enable_prefix_caching": True}, "--host-cache-size"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"elastic_memory": True}, "--advanced.elastic-memory"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"quantization": "int4"}, "--quantization int4"),
        ({"device": "cuda:1"}, "--device cuda:1"),
    ],
)
def test_what_vllm_cannot_have_is_refused_by_name(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        engine_args(config(**fields), "")


@pytest.mark.parametrize(
    "more",
    [
        "--max-num-seqs 4",
        "--max_num_seqs=4",
        "--no-enable-prefix-caching",
        "--num-gpu-blocks-override 9",
        "-tp 2",
        "-tp=2",
        "-q fp8",
        "-qfp8",
        "-q=fp8",
        "-ep",
    ],
)
def test_options_of_baton_are_given_to_baton(more: str) -> None:
    with pytest.raises(ValueError, match="is an option of Baton, too"):
        engine_args(config(), f"--enforce-eager {more}")


def test_more_options_are_split_as_by_a_shell() -> None:
    given = engine_args(config(), "--hf-overrides '{\"a\": 1}' --enforce-eager")
    assert given == ("--hf-overrides", '{"a": 1}', "--enforce-eager")
    with pytest.raises(ValueError, match="--vllm-args: No closing quotation"):
        engine_args(config(), "'")
    with pytest.raises(ValueError, match=r"kv-transfer-config\.kv_role is Baton's own"):
        engine_args(config(), "--kv-transfer-config.kv_role kv_both")
    with pytest.raises(ValueError, match="--config: its file may have options of Baton"):
        engine_args(config(), "--config FILE")
    with pytest.raises(ValueError, match="--kv-events-config is Baton's own"):
        engine_args(config(), "--kv-events-config '{}'")
    with pytest.raises(ValueError, match="--kv_offloading_size: vLLM would put its connector in the place"):
        engine_args(config(), "--kv_offloading_size 4")
    with pytest.raises(ValueError, match="--reasoning-parser=qwen3: give --reasoning-parser to the router"):
        engine_args(config(), "--reasoning-parser=qwen3")
    with pytest.raises(ValueError, match=r"mm-processor-cache-gb=4 is Baton's own"):
        engine_args(config(), "--mm-processor-cache-gb=4")


@pytest.mark.parametrize(
    ("more", "other"),
    [
        ("--enforce-eager", False),
        ("--hf-overrides {}", True),
        ("--hf_overrides={}", True),
        ("--hf-overrides.rope_theta 9", True),
        ("--enforce-eager --no-disable-sliding-window --lora-dtype float16", True),
        ("--no-enable-tower-connector-lora", False),
    ],
)
def test_kv_may_be_other_than_that_of_batons_engine(more: str, other: bool) -> None:
    assert computes_other_kv(engine_args(config(), more)) == other


@pytest.mark.parametrize(
    ("version", "error"),
    [("0.26.0", ""), ("0.32.1+cpu", ""), ("0.25.3", "vLLM 0.25.3 is installed"), ("0.33.0", "0.26 to 0.32")],
)
def test_only_tested_versions(monkeypatch: pytest.MonkeyPatch, version: str, error: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    check_version(untested=True)
    if error:
        with pytest.raises(ValueError, match=error):
            check_version(untested=False)
        with pytest.raises(ValueError, match=r"BatonConnector: .* or use Baton"):
            check_version(untested=False, part="BatonConnector", remedy="use Baton's engine")
    else:
        check_version(untested=False)


def test_vllm_is_not_in_this_environment() -> None:
    with pytest.raises(ValueError, match=r"pip install -e '.\[vllm\]'"):
        check_version(untested=True)


def test_an_engine_in_a_group_knows_its_rank_and_where_they_meet() -> None:
    group = Group("0" * 16, 1, 4, 7777, 8, 9)
    line = [*engine_args(config(device="cuda"), "--seed-x 3", group, experts=True)]
    assert line[:2] == ["--seed-x", "3"]
    pairs = dict(pairwise(line))
    assert pairs["--data-parallel-size"] == "4"
    assert pairs["--data-parallel-rank"] == "1"
    assert (pairs["--data-parallel-address"], pairs["--data-parallel-rpc-port"]) == ("127.0.0.1", "7777")
    assert {"--data-parallel-external-lb", "--enable-expert-parallel"} < {*line}
    assert "--enable-expert-parallel" not in engine_args(config(device="cpu"), "", group)
    with pytest.raises(ValueError, match="--enable-expert-parallel: vLLM for CPUs cannot"):
        engine_args(config(device="cpu"), "", experts=True)
    for given in ("--data-parallel-rank 1", "-dp 2", "-dpn=1", "--data_parallel_address x"):
        with pytest.raises(ValueError, match="give --data-parallel-size N to Baton"):
            engine_args(config(device="cpu"), given)
    with pytest.raises(ValueError, match="--data-parallel-size is an option of Baton, too"):
        engine_args(config(device="cpu"), "--data-parallel-size 2")


def test_each_engine_of_a_server_has_a_port_of_its_own() -> None:
    assert [Settings(port=7002).of_rank(rank).port for rank in range(3)] == [7002, 7003, 7004]
    assert Settings().of_rank(2).port == 0, "one is chosen"


DTYPES = """
import sys, types, torch
from baton.engine import EngineConfig
from baton.vllm_worker.llm import engine_args_of
for amx, dtype in ((True, "auto"), (True, "bfloat16"), (False, "auto")):
    torch.cpu.get_capabilities = lambda: {"amx_tile": amx}
    engine = EngineConfig(sys.argv[1], dtype=dtype, device="cpu")
    print(engine_args_of(types.SimpleNamespace(engine=engine, engine_args=()), "socket").dtype)
"""


@pytest.mark.long
def test_a_cpu_has_a_default_dtype_that_other_workers_can_read(tmp_path: Path) -> None:
    said = subprocess.run(
        [PYTHON, "-c", DTYPES, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.split()[-3:] == ["float32", "bfloat16", "auto"]
