"""From the user's name of a model to a loaded model.

find the checkpoint ─▶ read the model's configuration ─▶ build the model from its tensors
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from baton.engine.api.config import EngineConfig
from baton.engine.layers.ranks import Ranks
from baton.engine.layers.weights import Checkpoint, DeclaredWeights, PlainFormat, Weights, as_built
from baton.engine.loader.by_module import ByModule
from baton.engine.loader.device_file import wait_for_copy
from baton.engine.loader.draft_heads import FoundHead, find_head
from baton.engine.loader.families import FAMILIES, model_class
from baton.engine.loader.formats import choose_format
from baton.engine.loader.gguf_checkpoint import open_gguf
from baton.engine.loader.hf import OTHER_FORMATS, DummyCheckpoint, HFCheckpoint
from baton.engine.loader.hf_config import read_config
from baton.engine.loader.hybrid_config import chosen_dtype
from baton.engine.model_config import LongRopeScaling, ModelConfig
from baton.engine.models.draft_heads import DraftHead
from baton.engine.models.llama import Llama


def checkpoint_path(config: EngineConfig) -> Path:
    """Finds the checkpoint's directory or file; one of the hub is downloaded. Raises `ValueError` if there is
    none."""
    patterns = ["*.json"] if config.load_format == "dummy" else ["*.json", "*.safetensors"]
    return _located("--model", config.model, config.revision, patterns)


def open_checkpoint(
    config: EngineConfig, device: torch.device, progress: Callable[[str, float], None] | None = None
) -> Checkpoint:
    """Finds the checkpoint and reads its configuration, but no weights. `progress`: of an engine that starts,
    and waits until a trainer has copied its tensors. Raises `ValueError` naming the file and what is wrong
    with it."""
    path = checkpoint_path(config)
    if progress is not None:
        wait_for_copy(path, progress)
    if path.is_file():
        checkpoint = open_gguf(path)  # which has no encoder, and no states
        chosen_dtype(checkpoint.config.state, config.state_dtype, config.model)
        if config.load_format == "auto":
            return checkpoint
        return DummyCheckpoint(checkpoint.config, str(path), config.seed, device)
    shape = read_config(path, images=not config.language_model_only, model_impl=config.model_impl)
    shape = replace(shape, state=chosen_dtype(shape.state, config.state_dtype, config.model))
    if config.load_format == "auto":
        return in_one_form(HFCheckpoint(path, shape, device))
    return DummyCheckpoint(shape, str(path), config.seed, device)


def in_one_form(files: HFCheckpoint) -> Checkpoint:
    """Tensors in the form of most families, or of modules."""
    if files.config.modules is not None:
        from baton.engine.loader.modules import ModulesCheckpoint  # late: others need no transformers

        return ModulesCheckpoint(files)
    rearranged = FAMILIES[files.config.architecture].checkpoint
    return rearranged(files) if rearranged else files


def check_model(engine: EngineConfig) -> None:
    """Finds errors of a checkpoint without reading its weights. Raises `ValueError` for a model
    that is not supported, for files and tensors that are missing, cut short or of another shape, if
    `tensor_parallel_size` does not fit the heads or the experts, and if `encoder_pool` has nothing to do."""
    checkpoint = open_checkpoint(engine, torch.device("cpu"))
    checkpoint.config.of_rank(engine.tensor_parallel_size)
    checkpoint.config.check_step(engine.max_num_batched_tokens, engine.max_num_seqs)
    if engine.enable_expert_parallel:
        checkpoint.config.check_expert_parallel(engine.tensor_parallel_size)
    weight_format = choose_format(engine, checkpoint.config, torch.device(engine.device))
    model, _ = _declared(checkpoint, weight_format, sampled=False)
    if engine.encoder_pool:
        check_encoder(engine, checkpoint.config, has_weights=bool(getattr(model, "tower", {})))
    if (head := draft_head(engine, checkpoint, weight_format)) is not None:
        head_weights = DeclaredWeights(head.checkpoint, head.weight_format)
        head.build(model, 1, head_weights)
        head_weights.check_all_taken()


def check_encoder(engine: EngineConfig, model: ModelConfig, *, has_weights: bool) -> None:
    """Raises `ValueError` if no encoder can encode images for this model. `has_weights`: files of the model
    have those of its encoder."""
    if model.vision is None:
        taken = "--language-model-only" if engine.language_model_only else f"--model {engine.model}"
        raise ValueError(
            f"{taken}: the model takes no images, so leave out --encode and --advanced.encoder-pool"
        )
    if not has_weights and engine.load_format != "dummy":
        raise ValueError(f"--model {engine.model}: its files have no weights of an encoder of images")


def model_fingerprint(engine: EngineConfig, max_model_len: int) -> str:
    """Returns the fingerprint of `load_model` without loading the model. Raises `ValueError` as `check_model`
    does."""
    checkpoint = open_checkpoint(engine, torch.device("cpu"))
    weight_format = choose_format(engine, checkpoint.config, torch.device(engine.device))
    _, weights = _declared(checkpoint, weight_format, sampled=True)
    return _fingerprint(checkpoint.config, max_model_len, weights, weight_format)


def draft_head(engine: EngineConfig, checkpoint: Checkpoint, weight_format: PlainFormat) -> FoundHead | None:
    """What drafts on the device. None: nothing does. Raises `ValueError` if drafts do not fit the model."""
    wanted = engine.speculative_config
    if wanted is None or not wanted.by_device:
        return None
    directory = None
    if wanted.model:
        flag = "--speculative-config: model"
        directory = _located(flag, wanted.model, None, ["*.json", "*.safetensors"])
    return find_head(wanted, checkpoint, weight_format, directory)


def planned_format(engine: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> PlainFormat:
    """As `choose_format`, for plans of memory: a format that depends on the module knows how much of the
    model it keeps how, if the checkpoint has files."""
    weight_format = choose_format(engine, checkpoint.config, device)
    if not isinstance(weight_format, ByModule) or not checkpoint.names():
        return weight_format
    _, weights = _declared(checkpoint, weight_format, sampled=False)
    return replace(weight_format, parameters=weights.kept)


def _declared(
    checkpoint: Checkpoint, weight_format: PlainFormat, *, sampled: bool
) -> tuple[Llama, DeclaredWeights]:
    weights = DeclaredWeights(checkpoint, weight_format, sampled=sampled)
    config = replace(checkpoint.config, max_model_len=1)  # tables grow with the context
    model = model_class(config, checkpoint.source)(config, weights)
    weights.check_all_taken()
    return model, weights


def load_model(
    checkpoint: Checkpoint,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, float], None],
    weight_format: PlainFormat,
    ranks: Ranks,
    *,
    head: FoundHead | None = None,
    exact: bool = False,
    part_built: Callable[[str, Any], Any] = as_built,
) -> tuple[Llama, DraftHead | None, str]:
    """`exact`: as in `Kernels`; `part_built`: as in `Weights`. Returns this rank's part of the model and of
    its draft head, and the model's fingerprint: `model=…; weights=…; format=…`, and `drafts=…` with a head,
    whose KV goes along. Fingerprints are equal if configuration, weights and their format in memory are
    equal, in any format of files and with any number of ranks. They do not cover dtype and limits: these may
    differ between the two ends of a transfer, or are checked elsewhere."""
    weights = Weights(
        checkpoint, dtype, device, progress, weight_format, ranks, exact=exact, part_built=part_built
    )
    config = replace(checkpoint.config, max_model_len=max_model_len)
    model = model_class(config, checkpoint.source)(config, weights)
    weights.finish()
    fingerprint = _fingerprint(checkpoint.config, max_model_len, weights, weight_format)
    if head is None:
        return model, None, fingerprint
    head_weights = Weights(head.checkpoint, dtype, device, progress, head.weight_format, ranks, exact=exact)
    drafter = head.build(model, max_model_len, head_weights)
    head_weights.finish()
    return model, drafter, f"{fingerprint}; drafts={head.identity(head_weights)}"


def _fingerprint(
    config: ModelConfig, max_model_len: int, weights: Weights, weight_format: PlainFormat
) -> str:
    identity = replace(config, max_model_len=0, eos_ids=(), dtype=None)
    factors = None
    if isinstance(identity.rope_scaling, LongRopeScaling):
        factors = identity.rope_scaling.factors(max_model_len)
    digest = hashlib.sha256(f"{identity} {factors}".encode()).hexdigest()[:32]
    form = weight_format.identity or "plain"
    return f"model={digest}; weights={weights.fingerprint()[:32]}; format={form}"


def tokenizer_source(config: EngineConfig, checkpoint: str) -> str:
    """The directory or file with the tokenizer. `checkpoint`: that of the model."""
    if config.tokenizer is None:
        return checkpoint
    return str(_located("--tokenizer", config.tokenizer, None, ["tokenizer.json"]))


def _located(flag: str, name: str, revision: str | None, patterns: list[str]) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    if path.suffix == ".gguf" or name.startswith(("/", ".", "~")):
        raise ValueError(f"{flag} {name}: no such file or directory")
    from huggingface_hub import snapshot_download  # late, since a local model does not need this slow import

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS)
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{flag} {name}: not a file or directory here, and not available from the "
            f"Hugging Face hub: {error}"
        ) from error
