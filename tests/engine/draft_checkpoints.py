"""Small checkpoints with draft heads: random ones, and such as are always right or always wrong."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.engine import EngineConfig
from baton.engine.loader import open_checkpoint
from tests.engine.checkpoints import config_of, edit_json, edited_tensors
from tests.engine.conftest import save_tiny

LAYER = "model.layers.3."


def save_eagle(directory: Path, target: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    """Writes an EAGLE-3 head for the model of `target`, in the form that vLLM and SGLang read."""
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    model = open_checkpoint(EngineConfig(str(target)), torch.device("cpu")).config
    names = ("hidden_size", "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps")
    config = {name: getattr(model, name) for name in names}
    config |= {"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_act": "silu"}
    config |= {"draft_vocab_size": len(tensors["lm_head.weight"]), "torch_dtype": "float32", **changes}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )


def random_eagle(directory: Path, target: Path, **changes: Any) -> None:
    """With a vocabulary of its own, random weights, and no embedding."""
    model = open_checkpoint(EngineConfig(str(target)), torch.device("cpu")).config
    size, inner, vocabulary = model.hidden_size, model.intermediate_size, model.vocab_size
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "midlayer.self_attn.q_proj": (heads * head_dim, 2 * size),
        "midlayer.self_attn.k_proj": (kv_heads * head_dim, 2 * size),
        "midlayer.self_attn.v_proj": (kv_heads * head_dim, 2 * size),
        "midlayer.self_attn.o_proj": (size, heads * head_dim),
        "midlayer.mlp.gate_proj": (inner, size),
        "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner),
        "fc": (size, 3 * size),
        "lm_head": (vocabulary // 2, size),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"midlayer.{name}": (size,) for name in norms} | {"norm": (size,)}
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()
    }
    known = torch.randperm(vocabulary, generator=generator)[: vocabulary // 2].sort().values
    tensors["d2t"] = known - torch.arange(len(known))
    tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, known, True)
    save_eagle(directory, target, tensors, **changes)


def _add_shuffled(tensors: dict[str, Tensor], layer: str, added: str, generator: torch.Generator) -> None:
    """Adds a layer with the numbers of another one, in another order."""
    for name, tensor in [each for each in tensors.items() if each[0].startswith(layer)]:
        order = torch.randperm(tensor.numel(), generator=generator)
        tensors[name.replace(layer, added)] = tensor.flatten()[order].view(tensor.shape)


def save_mtp(directory: Path, kind: str, **changes: Any) -> Any:
    """Writes a tiny model with a layer that predicts a token further. Returns transformers' own instance,
    which leaves it out."""
    reference = save_tiny(directory, kind, num_nextn_predict_layers=0, **changes)
    add_mtp(directory)
    return reference


def add_mtp(directory: Path) -> None:
    """Adds such a layer to a model of three layers, in the form of DeepSeek-V3 and GLM."""
    generator = torch.Generator().manual_seed(7)
    with edited_tensors(directory) as tensors:
        size = tensors["model.norm.weight"].shape[0]
        _add_shuffled(tensors, "model.layers.2.", LAYER, generator)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{LAYER}{name}.weight"] = torch.rand(size, generator=generator) + 0.5
        tensors[f"{LAYER}eh_proj.weight"] = torch.randn((size, 2 * size), generator=generator) * 0.2
        # Copies, as in published checkpoints.
        tensors[f"{LAYER}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{LAYER}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    edit_json(directory / "config.json", num_nextn_predict_layers=1)


QWEN_LAYER = "mtp.layers.0."


def save_qwen_mtp(directory: Path, kind: str, **changes: Any) -> Any:
    """As `save_mtp`, in the form of Qwen3.5 and Qwen3-Next, whose norms multiply by 1 + weight."""
    reference = save_tiny(directory, kind, **changes)
    generator = torch.Generator().manual_seed(7)
    with edited_tensors(directory) as tensors:
        size = tensors["model.norm.weight"].shape[0]
        _add_shuffled(tensors, "model.layers.1.", QWEN_LAYER, generator)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            tensors[f"mtp.{name}.weight"] = torch.rand(size, generator=generator) - 0.5
        tensors["mtp.fc.weight"] = torch.randn((size, 2 * size), generator=generator) * 0.2
    edit_json(directory / "config.json", mtp_num_hidden_layers=1, num_nextn_predict_layers=1)
    return reference


SMALL_VOCABULARY = 60


def _follows(directory: Path, norm: float = 1.0) -> Tensor:
    """Makes the next token of a model a function of the newest one: its layers add nothing, and embeddings
    are orthogonal. `norm`: weights with which norms do nothing. Returns the token after each token."""
    circle = torch.randperm(SMALL_VOCABULARY, generator=torch.Generator().manual_seed(3))
    follows = torch.empty_like(circle)
    follows[circle] = circle.roll(1)
    with edited_tensors(directory) as tensors:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensor.zero_()
            if name.endswith("norm.weight"):
                tensor.fill_(norm)
        size = tensors["model.norm.weight"].shape[0]
        tensors["model.embed_tokens.weight"] = torch.eye(size)[:SMALL_VOCABULARY]
        tensors["lm_head.weight"] = torch.eye(size)[:SMALL_VOCABULARY][follows.argsort()]
    return follows


def sure_eagle(target: Path, directory: Path, *, wrong: bool = False) -> None:
    """Writes a Llama whose next token follows from the newest one, and a head that knows it, or one that is
    always wrong."""
    save_tiny(target, "Llama", vocab_size=SMALL_VOCABULARY, tie_word_embeddings=False)
    follows = _follows(target)
    random_eagle(directory, target, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    size, inner = config_of(target)["hidden_size"], config_of(target)["intermediate_size"]
    order = torch.randperm(SMALL_VOCABULARY, generator=torch.Generator().manual_seed(4))
    with edited_tensors(directory) as tensors:
        for name, tensor in tensors.items():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
        tensors["midlayer.self_attn.o_proj.weight"].zero_()
        # Takes the token of a position: the inputs of all layers are its embedding.
        tensors["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, 2 * size)), dim=1)
        # Adds the embedding of the token that follows, and takes that of the token away.
        one = torch.eye(inner, size)
        tensors["midlayer.mlp.gate_proj.weight"], tensors["midlayer.mlp.up_proj.weight"] = one, one.clone()
        at_one = torch.nn.functional.silu(torch.tensor(size**0.5)) * size**0.5
        change = torch.zeros(size, inner)
        change[follows, torch.arange(SMALL_VOCABULARY)] += 1 / at_one
        change[torch.arange(SMALL_VOCABULARY), torch.arange(SMALL_VOCABULARY)] -= 1 / at_one
        tensors["midlayer.mlp.down_proj.weight"] = change
        head = torch.eye(size)[:SMALL_VOCABULARY][follows.argsort()]
        tensors["lm_head.weight"] = (head.roll(1, 0) if wrong else head)[order]
        tensors["d2t"] = order - torch.arange(SMALL_VOCABULARY)


def sure_mtp(directory: Path, *, wrong: bool = False, qwen: bool = False) -> None:
    """Writes a model with a layer that predicts a token further, as `sure_eagle`. `qwen`: one with states."""
    save, kind = (save_qwen_mtp, "Qwen3_5Text") if qwen else (save_mtp, "DeepseekV3")
    save(directory, kind, vocab_size=SMALL_VOCABULARY)
    follows = _follows(directory, norm=0.0 if qwen else 1.0)
    with edited_tensors(directory) as tensors:
        size = tensors["model.norm.weight"].shape[0]
        token = torch.eye(size)
        if wrong:  # then the head sees the token that follows the right one
            token = torch.zeros(size, size)
            token[follows, torch.arange(SMALL_VOCABULARY)] = 1.0
        little = torch.full((size, size), 1e-3)  # position 0 sees no token, and its latent should not be 0
        tensors["mtp.fc.weight" if qwen else f"{LAYER}eh_proj.weight"] = torch.cat((token, little), dim=1)
