"""Sampling defaults of a model: what its generation_config.json recommends, as vLLM takes it."""

import json
from pathlib import Path
from typing import Any

from baton.router.api.bodies import GenerationBody
from baton.router.api.validation import validate
from baton.router.errors import InvalidRequest

FILE = "generation_config.json"
NONE = "vllm"
"""The value of --generation-config without any recommended defaults."""
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingDefaults(GenerationBody):
    """The fields that a request gets if it leaves them out."""

    limits_output: bool = False
    """`max_tokens` also limits requests that set it."""


def sampling_defaults(chosen: str, model: Path) -> SamplingDefaults:
    """Returns the defaults of a model. `max_tokens` is a limit if it comes from a directory that was chosen.

    Args:
        chosen: the value of --generation-config: auto, vllm, or the path of a directory.
        model: the path of the model.

    Raises ValueError when the file is missing in that directory, or has a value out of range.
    """
    file = (model if chosen == "auto" else Path(chosen)) / FILE
    if chosen == NONE or (chosen == "auto" and not file.is_file()):
        return SamplingDefaults()
    try:
        recommended: dict[str, Any] = json.loads(file.read_text())
        fields = {name: recommended.get(name) for name in _NAMES}
        length = {"max_tokens": recommended.get("max_new_tokens"), "limits_output": chosen != "auto"}
        return validate(SamplingDefaults, fields | length)
    except OSError as error:
        raise ValueError(f"--generation-config {chosen}: {file} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, InvalidRequest) as error:
        raise ValueError(f"--generation-config {chosen}: {file}: {error}; {NONE} ignores the file") from error


def shown(defaults: SamplingDefaults) -> dict[str, float]:
    """Returns the fields that have a value."""
    return defaults.model_dump(include={*_NAMES, "max_tokens"}, exclude_none=True)
