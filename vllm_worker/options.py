"""vLLM's command line from the options of a worker. Without vLLM itself."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from baton.engine import EngineConfig, SpeculativeConfig
from baton.engine.api.config import flag_of
from baton.worker.group import Group

_RENAMED = {"num_blocks": "num_gpu_blocks_override", "state_dtype": "mamba_ssm_cache_dtype"}
_SAME = (
    "model", "revision", "tokenizer", "dtype", "block_size", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "gpu_memory_utilization", "seed", "tensor_parallel_size", "num_blocks",
)  # fmt: skip
_OWN = {
    "load_format", "quantization", "kv_cache_dtype", "enable_prefix_caching", "enable_expert_parallel",
    "language_model_only", "data_parallel_size", "served_model_name", "lora_modules",
    "max_loras", "max_cpu_loras", "max_lora_rank",
}  # fmt: skip
_MEANINGLESS = (
    "elastic_memory", "host_cache_size", "disk_cache_size", "disk_cache_dir", "batch_invariant",
    "enable_memory_saver",
)  # fmt: skip
_LARGE_GRAPHS = {"cudagraph_mode": "FULL", "max_cudagraph_capture_size": 512}
"""For steps that also take a part of a prompt: with 100 tokens beside 8 decodes (8B, H200) such a step takes
6.9 ms in one graph, 11.5 in a graph in pieces, and 25 without one. By default vLLM has one graph only for
steps that only decode, and none for 150 tokens if few requests may run. If the attention cannot be in such a
graph, vLLM warns, and keeps pieces."""
_GRAPHS = re.compile("-O|-cc|--compilation-config|--(max-)?cudagraph|--enforce-eager")
_PROCESSED = "--mm-processor-cache-gb"
"""0: a worker that fetches KV is not given images, and another time it is. So none may be left out since vLLM
has had it. The embeddings that vLLM's encoder made are cached all the same."""
_LORA = "--enable-lora"
"""Follows from the options of adapters."""
_CONNECTORS = "kv_transfer_config", "kv_events_config"
_SHORT = {"-q": "--quantization", "-tp": "--tensor-parallel-size", "-ep": "--enable-expert-parallel"}
"""vLLM's other names of options of Baton. The first one may have its value behind it: -qfp8."""
_DRAFTS = "--speculative-config", "-sc"
_REASONING = "--reasoning-parser"
"""A grammar of Baton has the reasoning. vLLM would give it only what follows."""
_OFFLOADING = "--kv-offloading-size", "--kv-offloading-backend"
_OTHER_KV = {
    "--hf-overrides", "--hf-config-path", "--config-format", "--model-impl", "--model-class-overrides",
    "--model-weights", "--code-revision", "--quantization-config", "--disable-sliding-window",
    "--model-loader-extra-config", "--ignore-patterns", "--mamba-cache-dtype", "--mamba-ssm-cache-dtype",
    "--mm-processor-kwargs", "--mm-encoder-attn-dtype", "--mm-encoder-fp8-scale-path", "--lora-dtype",
    "--lora-target-modules", "--enable-tower-connector-lora",
}  # fmt: skip
"""With these vLLM may compute other KV of the same files. `identity` has their values."""


def engine_args(
    engine: EngineConfig, more: str, group: Group | None = None, *, experts: bool = False
) -> tuple[str, ...]:
    """Returns `more`, the text of --vllm-args, as words, and the options of an engine in a group. `experts`:
    each GPU has whole ones. Raises ValueError for what vLLM cannot have."""
    if experts and engine.device == "cpu":  # vLLM's kernel would take another expert, or crash
        raise ValueError(
            "--enable-expert-parallel: vLLM for CPUs cannot compute with some of the experts; leave it out"
        )
    for name in _MEANINGLESS:
        if getattr(engine, name):
            raise ValueError(f"{flag_of(name)}: has no meaning with --engine vllm; leave it out")
    if engine.kv_cache_dtype != "auto":
        raise ValueError(f"--kv-cache-dtype {engine.kv_cache_dtype}: --engine vllm supports only auto")
    if engine.model_impl != "auto":
        raise ValueError(
            f"--advanced.model-impl {engine.model_impl}: is of Baton's own engine; give vLLM's in --vllm-args"
        )
    if engine.quantization not in ("auto", "fp8"):
        raise ValueError(
            f"--quantization {engine.quantization}: is of Baton's own engine; --engine vllm has auto and fp8"
        )
    if engine.device not in ("cpu", "cuda"):
        raise ValueError(
            f"--device {engine.device}: with --engine vllm choose cpu or cuda, and CUDA_VISIBLE_DEVICES"
        )
    try:
        args = shlex.split(more)
    except ValueError as error:
        raise ValueError(f"--vllm-args: {error}") from error
    _check_args(args)
    if engine.speculative_config is not None and any(arg.startswith(_DRAFTS) for arg in args):
        raise ValueError(f"{_DRAFTS[0]}: it is also in --vllm-args; give it once")
    return (*args, *(() if group is None else _of_group(group, experts=experts)))


def _check_args(args: Sequence[str]) -> None:
    """Raises ValueError for words of --vllm-args that are for Baton to say."""
    baton_flags = {_flag(name) for name in _OWN.union(_SAME)} | {_flag(_RENAMED[name]) for name in _RENAMED}
    for arg in args:
        flag = _flag_of(arg)
        if flag in baton_flags or flag.replace("--no-", "--", 1) in baton_flags:
            raise ValueError(f"--vllm-args: {arg} is an option of Baton, too; give it there")
        if flag.startswith(("--data-parallel", "-dp")):
            raise ValueError(f"--vllm-args: {arg}: give --data-parallel-size N to Baton, which does the rest")
        if flag == "--config":
            raise ValueError(f"--vllm-args: {arg}: its file may have options of Baton; give vLLM's here")
        if flag in (*map(_flag, _CONNECTORS), _PROCESSED, _LORA):
            raise ValueError(f"--vllm-args: {arg} is Baton's own: leave it out")
        if flag.startswith(_REASONING):
            raise ValueError(f"--vllm-args: {arg}: give {_REASONING} to the router")
        if flag in _OFFLOADING:
            raise ValueError(f"--vllm-args: {arg}: vLLM would put its connector in the place of Baton's")


def computes_other_kv(more: Sequence[str]) -> bool:
    """Whether vLLM may compute other KV than Baton's engine of the same files. `more`: of `engine_args`."""
    return any(_flag_of(arg) in _OTHER_KV for arg in more)


def _flag_of(arg: str) -> str:
    """The long name of the option that a word is, without its value. Of any other word: something else."""
    flag = re.sub(r"[=.].*", "", arg).replace("_", "-")
    return _SHORT.get(flag[:2] if flag.startswith("-q") else flag, flag)


def command_line(engine: EngineConfig, more: Sequence[str]) -> list[str]:
    """Returns the options of vLLM's engine. `more` are those of `engine_args`."""
    line: list[str] = []
    for name in _SAME:
        if (value := getattr(engine, name)) is not None:
            line += [_flag(_RENAMED.get(name, name)), str(value)]
    for name in ("load_format", "quantization", "state_dtype"):
        if (value := getattr(engine, name)) != "auto":
            line += [_flag(_RENAMED.get(name, name)), value]
    line.append("--enable-prefix-caching" if engine.enable_prefix_caching else "--no-enable-prefix-caching")
    if (drafts := engine.speculative_config) is not None:
        line += ["--speculative-config", json.dumps(_of_drafts(drafts))]
    if engine.enable_expert_parallel:
        line.append("--enable-expert-parallel")
    if engine.language_model_only:
        line.append("--language-model-only")
    if engine.loads_adapters:
        on_device = engine.max_loras or max(1, len(engine.lora_modules))
        loaded = engine.max_cpu_loras or max(on_device, len(engine.lora_modules))
        line += [_LORA, "--max-loras", str(on_device), "--max-cpu-loras", str(loaded)]
        if engine.max_lora_rank is not None:
            line += ["--max-lora-rank", str(engine.max_lora_rank)]
    line += [_PROCESSED, "0"]
    if engine.device == "cuda" and not any(map(_GRAPHS.match, more)):
        line += ["--compilation-config", json.dumps(_LARGE_GRAPHS)]
    return [*line, *more]


def _of_drafts(drafts: SpeculativeConfig) -> dict[str, Any]:
    """Returns what the method has, in vLLM's form, whose names are the same."""
    looked_up = drafts.method == "ngram"
    fields = asdict(drafts).items()
    return {x: value for x, value in fields if value != "" and (looked_up or not x.startswith("prompt_"))}


def _of_group(group: Group, *, experts: bool) -> tuple[str, ...]:
    """Returns the options of an engine in a group. Each has a server of its own (external load balancing).
    That of rank 0 starts the process that coordinates their steps. `experts`: each engine has whole ones."""
    return (
        "--data-parallel-size", str(group.size),
        "--data-parallel-rank", str(group.rank),
        "--data-parallel-external-lb",
        "--data-parallel-address", "127.0.0.1",
        "--data-parallel-rpc-port", str(group.port),
        *(["--enable-expert-parallel"] if experts else []),
    )  # fmt: skip


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
