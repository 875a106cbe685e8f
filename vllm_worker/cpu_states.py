"""A prefix cache of Mamba-2's states in vLLM for CPUs (0.32).

vLLM's scheduler lets these layers keep a state from within a step, at the last end of a block. The kernel
for CPUs returns only the states at the end of a step, and the engine dies with the first prompt that ends
behind a boundary. For layers that keep no such state vLLM cuts prompts there: so do these, then.
"""

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2


def cut_prompts_at_blocks() -> None:
    """In the process whose forks have the model. May be repeated."""
    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
