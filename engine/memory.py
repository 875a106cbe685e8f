"""How much of what goes where: dtype, block size, number of blocks, and the context that this allows."""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.model_config import ModelConfig

CPU_POOL_BYTES = 1 << 30
"""KV pool on a CPU. The system maps its pages only when they are first written."""
ACTIVATION_BYTES = 64
"""Room for activations on a GPU, per token of a step and dimension of the MLP: generous."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    dtype: torch.dtype
    block_size: int
    num_blocks: int
    max_model_len: int


def plan_memory(config: EngineConfig, model: ModelConfig, device: torch.device) -> MemoryPlan:
    """Raises `ValueError` naming the flag if the pool cannot hold one request of the wanted length."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {config.device}: no CUDA device here; use --device cpu")
    dtype = choose_dtype(config, model, device)
    block_size = config.block_size or (128 if device.type == "cuda" else 16)
    wanted = config.max_model_len or model.max_model_len
    if wanted > model.max_model_len:
        raise ValueError(f"--max-model-len {wanted}: the model's context is {model.max_model_len}")
    num_blocks = config.num_blocks or _blocks_that_fit(config, model, device, dtype, block_size)
    capacity = num_blocks * block_size
    if config.max_model_len and capacity < wanted:
        raise ValueError(
            f"--max-model-len {wanted}: the KV pool holds {capacity} tokens; lower it, or raise "
            f"{'--num-blocks' if config.num_blocks else '--gpu-memory-utilization or --num-blocks'}"
        )
    return MemoryPlan(dtype, block_size, num_blocks, min(wanted, capacity))


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if model.dtype in ("float32", "bfloat16", "float16"):
        return getattr(torch, model.dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _blocks_that_fit(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, block_size: int
) -> int:
    budget = CPU_POOL_BYTES
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        weights = model.num_parameters * dtype.itemsize
        activations = config.max_num_batched_tokens * model.intermediate_size * ACTIVATION_BYTES
        budget = int(config.gpu_memory_utilization * total) - (total - free) - weights - activations
    most = config.max_num_seqs * model.max_model_len  # tokens; nobody could use more
    blocks = min(budget // (model.kv_elements_per_token * dtype.itemsize), most) // block_size
    if blocks < 1:
        raise ValueError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization}: no memory is left for KV beside the "
            "weights; raise it, or choose a smaller model"
        )
    return blocks
