"""By what a vLLM server with Baton's connector and its peers know each other: secret and model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub

from baton.rpc.auth import SECRET_VARIABLE, load_secret

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_OF_MODEL = (
    "quantization", "quantization_config", "model_impl", "model_class_overrides", "disable_sliding_window",
)  # fmt: skip
_OF_FILES = "model_loader_extra_config", "ignore_patterns"
_OF_STATES = "mamba_cache_dtype", "mamba_ssm_cache_dtype"
_OF_IMAGES = "mm_processor_kwargs", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"
_OF_ADAPTERS = "lora_dtype", "target_modules", "enable_tower_connector_lora"
_FORMS = "*.safetensors", "*.bin", "*.pt"
"""Of files with weights. vLLM prefers the first."""


def secret(host: str) -> bytes:
    """Returns the secret that all servers share: of the cluster, or of this user on this machine."""
    if SECRET_VARIABLE in os.environ or not host.startswith("127."):
        return load_secret()
    path = Path.home() / ".cache" / "baton" / "vllm-secret"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_text(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):  # another server was faster, or this is not the first start
        path.hardlink_to(draft)
    draft.unlink()
    return load_secret(path)


def fingerprint(config: VllmConfig) -> str:
    """Returns the name of the model, equal on servers whose KV means the same.

    It covers weights, and what vLLM's options change of the KV that it computes of them. vLLM has read
    `--hf-overrides` and a file of `--hf-config-path` into `hf_config`. A `KVLayout` covers plain formats."""
    model, load, cache = config.model_config, config.load_config, config.cache_config
    shape = {key: value for key, value in model.hf_config.to_dict().items() if not key.startswith("_")}
    shape.pop("transformers_version", None)
    said = [
        shape,
        str(model.dtype),
        cache.cache_dtype if cache.cache_dtype.startswith("fp8") else None,
        load.load_format == "dummy",
        _has_long_factors(model),
        _values(model, *_OF_MODEL),
        _values(load, *_OF_FILES),
        _values(cache, *_OF_STATES),
        _values(model.multimodal_config, *_OF_IMAGES),
        # Servers that differ only in whether they take adapters have one KV without them.
        [value for value in _values(config.lora_config, *_OF_ADAPTERS) if value not in (None, model.dtype)],
    ]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode())
    for sample in _weights(config):
        digest.update(sample)
    return f"model={digest.hexdigest()[:32]}; engine=vllm"


def _values(config: Any, *names: str) -> list[Any]:
    """Those of a part of vLLM's configuration. None: it has no such part, this vLLM has no such option, or
    the option is not used."""
    return [getattr(config, name, None) or None for name in names]


def _has_long_factors(model: ModelConfig) -> bool:
    """Whether vLLM scales rotary frequencies for a long context, which follows from --max-model-len."""
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    return "long_factor" in rope and original is not None and model.max_model_len > original


def _weights(config: VllmConfig) -> Iterator[bytes]:
    """Yields samples of the files that vLLM has read, or their name if they are not on this machine."""
    model = config.model_config
    name = model.model_weights or model.model
    path = Path(name)
    if not path.exists():
        try:
            path = Path(
                huggingface_hub.snapshot_download(
                    name, revision=model.revision, cache_dir=config.load_config.download_dir,
                    local_files_only=True,
                )
            )  # fmt: skip
        except (OSError, ValueError):  # in a store of objects
            yield f"{name} {model.revision}".encode()
            return
    found = ([path] if path.is_file() else sorted(path.glob(form)) for form in _FORMS)
    for file in next(filter(None, found), []):
        yield _sample(file)


def _sample(file: Path) -> bytes:
    """Returns 4 KiB of each of 64 places of a file. Training changes all tensors."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        samples = [str(size).encode()]
        for i in range(64):
            opened.seek(size * i // 64)
            samples.append(opened.read(4096))
    return b"".join(samples)
