"""By what a vLLM server with Baton's connector and its peers know each other: secret and model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from baton.rpc.auth import SECRET_VARIABLE, load_secret

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
    """Returns the name of the model, equal on servers whose KV means the same."""
    model = config.model_config
    shape = {key: value for key, value in model.hf_config.to_dict().items() if not key.startswith("_")}
    shape.pop("transformers_version", None)
    said = json.dumps(
        [shape, str(model.dtype), model.quantization, model.revision], sort_keys=True, default=str
    )
    digest = hashlib.sha256(said.encode())
    for file in sorted(Path(model.model).glob("*.safetensors")):
        digest.update(_sample(file))
    return f"model={digest.hexdigest()[:32]}; engine=vllm"


def _sample(file: Path) -> bytes:
    """Returns 4 KiB of each of 64 places of a file. Training changes all tensors."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        samples = [str(size).encode()]
        for i in range(64):
            opened.seek(size * i // 64)
            samples.append(opened.read(4096))
    return b"".join(samples)
