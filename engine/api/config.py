"""The user's configuration of an engine. Errors name the flag and the remedy."""

import json
import re
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

from baton.kv_names import CHUNK_TOKENS, Tier

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "fp8"),
    "state_dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_format": ("auto", "dummy"),
    "model_impl": ("auto", "baton", "transformers"),
}
DEVICE = re.compile(r"cpu|cuda(:\d+)?", re.ASCII)
ADVANCED = (
    "block_size", "num_blocks", "num_threads", "max_loras", "max_cpu_loras", "max_lora_rank", "model_impl",
    "state_dtype", "elastic_memory", "encoder_pool", "seed", "skip_model_check",
)  # fmt: skip
"""Settings whose flags begin with `--advanced.`."""
AT_LEAST_ONE = (
    "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_threads",
    "tensor_parallel_size", "max_loras", "max_cpu_loras", "max_lora_rank",
)  # fmt: skip


METHODS = ("ngram", "mtp", "eagle3")
"""Prompt lookup (`engine.core.speculation`), and the keys of `engine.models.draft_heads.DRAFT_HEADS`."""
MOST_DRAFTS = 7
"""More queries of a request would read their KV in another way."""
MOST_LOOKUP = 32
SPECULATIVE_ROWS = 256
"""Most tokens of a step with drafts, if fewer requests than that may decode: with so many rows, products and
not reading the weights bound a step."""


MemoryTag = Literal["kv_cache", "weights"]
"""Memory that an engine can give back, by SGLang's name."""
MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)


def versioned(fingerprint: str, version: str) -> str:
    """The fingerprint of a model with weights of this version. Empty: with those of `--model`."""
    return f"{fingerprint}; version={version}" if version else fingerprint


class TierCells(NamedTuple):
    """What a tier below the device keeps: blocks of KV, or copies of states."""

    tier: Tier
    of_states: bool


@dataclass(frozen=True)
class SpeculativeConfig:
    """How the next tokens of requests are drafted. Names follow vLLM. Raises `ValueError`."""

    method: str = "ngram"
    """One of `METHODS`."""
    num_speculative_tokens: int = 3
    """Most drafts of a request in a step."""
    model: str = ""
    """Where the draft head of `eagle3` is, in the forms of `EngineConfig.model`."""
    prompt_lookup_max: int = 4
    """Most tokens before a draft that must have come before, in the prompt or in the output."""
    prompt_lookup_min: int = 2
    """Fewest of them."""

    @classmethod
    def of(cls, text: str) -> "SpeculativeConfig":
        """From a JSON object."""
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--speculative-config: {text!r} is not JSON ({error})") from error
        if not isinstance(settings, dict):
            raise ValueError(f"--speculative-config: {text!r} is not a JSON object")
        known = {each.name: type(each.default) for each in fields(cls)}
        for name, value in settings.items():
            if name not in known:
                raise ValueError(f"--speculative-config: {name!r} is not one of {', '.join(known)}")
            if type(value) is not known[name]:
                raise ValueError(f"--speculative-config: {name} must be of type {known[name].__name__}")
        return cls(**settings)

    @property
    def by_device(self) -> bool:
        """Whether a draft head makes the drafts, on the device."""
        return self.method != "ngram"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(
                f"--speculative-config: method {self.method!r} is not one of {', '.join(METHODS)}"
            )
        if bool(self.model) != (self.method == "eagle3"):
            raise ValueError("--speculative-config: the method eagle3, and no other one, needs a model")
        for name, least, most in (
            ("num_speculative_tokens", 1, MOST_DRAFTS),
            ("prompt_lookup_min", 1, self.prompt_lookup_max),
            ("prompt_lookup_max", 1, MOST_LOOKUP),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"--speculative-config: {name} is {getattr(self, name)}; choose {least} to {most}"
                )


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of one engine. Names and defaults follow vLLM."""

    model: str
    """Directory in Hugging Face format, GGUF file, or name of a repository on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    weights_version: str = ""
    """Of the weights of `model`, as for `Engine.replace_weights`. Empty: they are those of the user."""
    tokenizer: str | None = None
    """Where the tokenizer is, in the forms of `model`. None: it is that of `model`."""
    dtype: str = "auto"
    """Type of weights and activations. `auto`: the checkpoint's; for GGUF, bfloat16 on CUDA and on a CPU that
    reads packed weights, else float32."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache. `auto`: as `dtype`. `fp8`: with a scale for each token and head."""
    state_dtype: str = "auto"
    """Type of the states of Mamba-2 and linear attention. `auto`: what the checkpoint says, else float32."""
    device: str = "cpu"
    load_format: str = "auto"
    """`dummy`: random weights that depend on `seed`. Only the model's configuration is read."""
    quantization: str = "auto"
    """Format of the matrices: a name in `engine.loader.formats`. `auto`: the checkpoint's own; a GGUF file
    stays packed where that is fast. `none`: plain, if the file allows it."""
    model_impl: str = "auto"
    """What computes the model. `baton`: a class of Baton. `transformers`: the modules of transformers, with
    Baton's attention. `auto`: a class of Baton if there is one."""
    skip_model_check: bool = False
    """Whether modules of transformers are served without a check that they compute the same with Baton's
    attention."""
    language_model_only: bool = False
    """Whether the model takes no images, also if it could. Then no encoder is loaded."""
    block_size: int | None = None
    """Positions per KV block: a divisor or a multiple of 64. None: 128 on CUDA, 16 on a CPU."""
    num_blocks: int | None = None
    """KV blocks in the pool. None: as many as fit beside the largest step; on a CPU, 1 GiB."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that this process may use: weights, activations, graphs and KV. The shares of
    all processes on a GPU must fit together."""
    other_bytes: int = 0
    """GPU memory that this process takes outside the engine, within its share."""
    stands_by: bool = False
    """Whether another engine process stands by on the same GPU, within the share of this one."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together. None: the model's context, or what a smaller pool holds."""
    max_num_seqs: int = 64
    """Requests in one step."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step. Longer prefills are cut into chunks."""
    enable_prefix_caching: bool = False
    host_cache_size: int = 0
    """Bytes of the host's memory for blocks that leave the prefix cache's GPU memory. 0: none."""
    disk_cache_size: int = 0
    """The same on a local disk, in a file in `disk_cache_dir`. 0: none."""
    disk_cache_dir: str | None = None
    elastic_memory: bool | None = None
    """Whether pages of memory move between KV and states, or window blocks, if `num_blocks` is None. None:
    yes, if their memory ends with the engine."""
    enable_memory_saver: bool = False
    """Whether `Engine.release_memory` can give memory back. Weights and KV then have memory of pages."""
    itl_target: float | None = None
    """Seconds of a gap. None: `itl_target_steps` decides. Steps that also compute prompts take this time
    only if a prompt would otherwise be late, and more only if decodes alone take most of it."""
    itl_target_steps: float = 3.5
    """As `itl_target`, in times of the fastest step that only decodes."""
    seed: int = 0
    """Seed of dummy weights."""
    num_threads: int | None = None
    """CPU threads of torch, of all ranks together. None: torch's default, at most the CPUs that
    this process may use."""
    speculative_config: SpeculativeConfig | None = None
    """How tokens are drafted. None: they are not."""
    overlap: bool | None = None
    """Whether a step is launched before the tokens of the step before are known. None: yes on CUDA."""
    cuda_graphs: bool = True
    """Whether CUDA graphs replay steps, and the encoder for images of a size that comes again. A CPU has
    none."""
    tensor_parallel_size: int = 1
    """Devices that hold the model together, each a part of every layer. It divides the query heads, and
    divides the KV heads or is a multiple of them. On GPUs rank i runs on the i-th from `device` on."""
    enable_expert_parallel: bool = False
    """Whether each rank holds whole experts of a mixture of experts, instead of a part of every expert."""
    lora_modules: tuple[str, ...] = ()
    """NAME=PATH of each adapter that is loaded at the start."""
    max_loras: int | None = None
    """Most adapters in one step, and on the device. None: one, or as many as `lora_modules`."""
    max_cpu_loras: int | None = None
    """Most adapters that are loaded. None: `max_loras`, or as many as `lora_modules` if they are more."""
    max_lora_rank: int | None = None
    """None: vLLM's default."""
    encoder_pool: bool = False
    """Whether images are encoded by other workers. This engine then loads no encoder."""
    batch_invariant: bool = False
    """Whether a request gets the same bits whatever shares its steps and however its prompt is cut, also in
    bfloat16 and FP8. Workers of the same numerics then continue each other's requests exactly."""

    @property
    def loads_adapters(self) -> bool:
        """Whether adapters (LoRA) can be loaded. Only vLLM can."""
        return bool(self.lora_modules or self.max_loras or self.max_cpu_loras or self.max_lora_rank)

    @property
    def adapters(self) -> dict[str, str]:
        """The paths of `lora_modules`, by name."""
        return dict(module.split("=", 1) for module in self.lora_modules)

    @property
    def ahead(self) -> int:
        """As in `engine.step.arrange`."""
        return 1 if self.speculative_config is None else 1 + self.speculative_config.num_speculative_tokens

    @property
    def max_decode_rows(self) -> int:
        """Most tokens of a step without prompts, drafts included."""
        most = min(SPECULATIVE_ROWS, self.max_num_batched_tokens, self.max_num_seqs * self.ahead)
        return max(self.max_num_seqs, most)

    @property
    def offload_sizes(self) -> dict[Tier, int]:
        """Bytes of each tier below the device, the fastest first."""
        sizes = {Tier.HOST: self.host_cache_size, Tier.DISK: self.disk_cache_size}
        return {tier: size for tier, size in sizes.items() if size}

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, remedy: str) -> None:
            if not holds:
                raise ValueError(f"{flag_of(name)} {getattr(self, name)!r}: {remedy}")

        require("model", bool(self.model), "give a directory, a GGUF file or a hub name")
        for name, choices in CHOICES.items():
            require(name, getattr(self, name) in choices, f"choose one of {', '.join(choices)}")
        require("device", bool(DEVICE.fullmatch(self.device)), "choose cpu, cuda or cuda:N")
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            require(name, value is None or value >= 1, "must be at least 1")
        size = self.block_size or CHUNK_TOKENS
        require(
            "block_size",
            not CHUNK_TOKENS % size or not size % CHUNK_TOKENS,  # so that fetched chunks fill whole blocks
            f"choose a divisor or a multiple of {CHUNK_TOKENS}, for example 16 or 128",
        )
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "--enable-expert-parallel: needs --tensor-parallel-size above 1, or leave it out"
            )
        most = self.max_cpu_loras
        require(
            "max_cpu_loras",
            most is None or most >= max(self.max_loras or 1, len(self.lora_modules)),
            "adapters on the device and those of --lora-modules count, too; raise it to at least "
            f"{max(self.max_loras or 1, len(self.lora_modules))}",
        )
        wrong = [module for module in self.lora_modules if not all(module.partition("="))]
        names = [module.partition("=")[0] for module in self.lora_modules]
        if wrong or len(set(names)) < len(names):
            raise ValueError(
                f"--lora-modules {', '.join(wrong or names)}: give NAME=PATH, with a name for each adapter"
            )
        share = self.gpu_memory_utilization
        require("gpu_memory_utilization", 0 < share <= 1, "must be above 0 and at most 1")
        for name in ("host_cache_size", "disk_cache_size"):
            require(name, getattr(self, name) >= 0, "must not be negative")
        for tier in self.offload_sizes if not self.enable_prefix_caching else ():
            raise ValueError(f"--{tier.name.lower()}-cache-size: needs --enable-prefix-caching")
        if self.disk_cache_size and self.disk_cache_dir is None:
            raise ValueError("--disk-cache-size: needs --disk-cache-dir")
        require("itl_target", self.itl_target is None or self.itl_target > 0, "must be a time above 0")
        require(
            "max_num_batched_tokens",
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"a step decodes one token of each running request; raise it to at least --max-num-seqs "
            f"({self.max_num_seqs}), or lower --max-num-seqs",
        )


def flag_of(name: str) -> str:
    """The flag of a setting of `EngineConfig`."""
    return f"--{'advanced.' * (name in ADVANCED)}{name.replace('_', '-')}"


def check_max_model_len(max_model_len: int, context: int) -> None:
    """Raises ValueError if the limit is longer than the model's context."""
    if max_model_len > context:
        raise ValueError(
            f"--max-model-len {max_model_len}: the model's context is {context} tokens; give at most "
            f"{context}, or leave the flag out"
        )
