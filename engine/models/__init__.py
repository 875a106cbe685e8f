"""The models, by the class names that Hugging Face checkpoints give in `architectures`."""

from engine.models.llama import Llama
from engine.models.qwen2 import Qwen2
from engine.models.qwen3 import Qwen3

MODELS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


def model_class(architecture: str, source: str) -> type[Llama]:
    """Raises `ValueError` naming `source`, the checkpoint, if there is none."""
    if architecture not in MODELS:
        raise ValueError(f"{source}: architecture {architecture} is not supported ({', '.join(MODELS)} are)")
    return MODELS[architecture]
