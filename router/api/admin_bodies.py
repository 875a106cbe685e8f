"""The bodies and queries of calls with the admin key."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.rpc.pause import Mode

LONGEST_PAUSE = 7 * 24 * 3600.0  # seconds
WeightLabel = Annotated[str, Field(pattern=r"^[!-:<-~]{1,64}$")]


class UpdateWeightsBody(BaseModel):
    """POST /update_weights_from_disk. Other fields of SGLang's call have no effect."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Checkpoint with the new weights, at the same place on the hosts of all workers."""
    weight_version: WeightLabel | None = None
    """Begins the name of the version, which has a random part, too: no other weights may have its name."""
    max_unavailable: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """So many workers change at a time, while the others serve. None: all change at once, and none serves."""
    load_format: Literal["auto"] | None = None
    abort_all_requests: Literal[False] | None = None
    keep_pause: Literal[False] | None = None


MemoryTag = Literal["kv_cache", "weights"]


class PauseQuery(BaseModel):
    """POST /pause."""

    mode: Mode = "abort"
    seconds: Annotated[float, Field(gt=0, le=LONGEST_PAUSE)] | None = None
    """None: `--request-timeout`. After it the requests that run now have ended: a pause serves none."""
    clear_cache: bool = True
    """Requests drop their KV if weights change in the pause."""


class MemoryBody(BaseModel):
    """POST /release_memory_occupation and /resume_memory_occupation, as in SGLang."""

    model_config = ConfigDict(strict=True)

    tags: Annotated[list[MemoryTag], Field(max_length=8)] | None = None
    """What to release, or to take again. Without: all."""


class TransferBackend(BaseModel):
    """How weights come to the workers."""

    model_config = ConfigDict(strict=True)

    backend: Literal["disk"] = "disk"


class InitTransferBody(BaseModel):
    """POST /init_weight_transfer_engine, as in vLLM."""

    model_config = ConfigDict(strict=True)

    init_info: TransferBackend


class DiskUpdate(BaseModel):
    """What a worker reads with the backend "disk"."""

    model_config = ConfigDict(strict=True, extra="forbid")

    path: Annotated[str, Field(pattern="^/", max_length=4096)]
    """Of a checkpoint on the hosts of all workers: on a disk, a shared file system, or in /dev/shm."""


class UpdateInfoBody(BaseModel):
    """POST /update_weights, as in vLLM."""

    model_config = ConfigDict(strict=True)

    update_info: DiskUpdate


class FinishWeightsBody(BaseModel):
    """POST /finish_weight_update, as in vLLM. The body may be empty."""

    model_config = ConfigDict(strict=True)

    weight_version: WeightLabel | None = None
    """Begins the name of the version, which has a random part, too: no other weights may have its name."""


class LoadAdapterBody(BaseModel):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    model_config = ConfigDict(strict=True)

    lora_name: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
    """What requests name as their model."""
    lora_path: Annotated[str, Field(pattern=r"^/", max_length=4096)]
    """Its directory, as PEFT writes it, at the same place on the hosts of all workers."""
    load_inplace: Literal[False] | None = None
    is_3d_lora_weight: Literal[False] | None = None


class UnloadAdapterBody(BaseModel):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    model_config = ConfigDict(strict=True)

    lora_name: Annotated[str, Field(min_length=1, max_length=128)]
    lora_int_id: int | None = None
    """Has no effect."""
