"""What one generation computes, and the sampling defaults of the model."""

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.router.api.bodies import GenerationBody
from baton.router.api.validation import validate
from baton.router.errors import ContextLengthExceeded, InvalidRequest
from baton.rpc import worker_pb2 as pb
from baton.vision.images import Image

FILE = "generation_config.json"
NONE = "vllm"
"""The value of --advanced.generation-config without any recommended defaults."""
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Sender:
    """For whom a request is computed, and by which weights."""

    session: str | None = None
    """The name of the client's session (`session_name`). None: it has none."""
    priority: int = 0
    """Beside the requests of other keys."""
    cache_salt: bytes = b""
    tenant: bytes = b""
    adapter: bytes = b""
    """As in `Request` in proto/worker.proto."""
    pair: tuple[str, str] | None = None
    """As in `PrefillRequest`."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one generation computes: token ids and sampling parameters, without text."""

    prompt_ids: "array[int]"
    """Four bytes each: in a list they take nine times as much."""
    sampling: pb.SamplingParams
    session_key: int
    """64-bit hash of the session."""
    chunks: list[int]
    """Hashes of the prompt's full 64-token chunks."""
    sender: Sender = Sender()
    images: tuple[Image[memoryview], ...] = ()
    """Those of the prompt, in order."""
    structure_field: str = ""
    """The field of the request that demands its structured output. Empty: none does."""

    @property
    def answer_names(self) -> tuple[int, bytes, str]:
        """By which answers are expected to be as long as earlier ones: session, key, and model."""
        return self.session_key, self.sender.tenant, self.sender.adapter.hex()

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are asked for."""
        return self.sampling.HasField("prompt_logprobs")


class SamplingDefaults(GenerationBody):
    """The fields that a request gets if it leaves them out: what the model's generation_config.json says."""

    limits_output: bool = False
    """`max_tokens` also limits requests that set it."""


def sampling_defaults(chosen: str, model: Path) -> SamplingDefaults:
    """Returns the defaults of a model. `max_tokens` is a limit if it comes from a directory that was chosen.

    Args:
        chosen: the value of --advanced.generation-config: auto, vllm, or the path of a directory.
        model: the path of the model.

    Raises ValueError when the file is missing in that directory, or has a value out of range.
    """
    file = (model if chosen == "auto" else Path(chosen)) / FILE
    if chosen == NONE or (chosen == "auto" and not file.is_file()):
        return SamplingDefaults()
    try:
        recommended: dict[str, Any] = json.loads(file.read_text())
        fields = {name: recommended.get(name) for name in RECOMMENDED}
        length = {"max_tokens": recommended.get("max_new_tokens"), "limits_output": chosen != "auto"}
        return validate(SamplingDefaults, fields | length)
    except OSError as error:
        raise ValueError(
            f"--advanced.generation-config {chosen}: {file} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, AttributeError, InvalidRequest) as error:
        raise ValueError(
            f"--advanced.generation-config {chosen}: {file}: {error}; {NONE} ignores the file"
        ) from error


def shown(defaults: SamplingDefaults) -> dict[str, float]:
    """Returns the fields that have a value."""
    return defaults.model_dump(include={*RECOMMENDED, "max_tokens"}, exclude_none=True)


def output_room(prompt_tokens: int, field: str, context: int) -> int:
    """Returns how many tokens fit after the prompt. Raises ContextLengthExceeded when none does."""
    room = context - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded.of_prompt(field, prompt_tokens, "tokens", context - 1, context)
    return room
