"""Writes a GGUF file as a Hugging Face directory, which vLLM can serve: `python embedded_model.py DIRECTORY`.

By default that of the embedded model. Weights are dequantized to bfloat16.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.cluster.model import embedded_path
from baton.engine.layers.ranks import Shard
from baton.engine.loader.gguf_checkpoint import GGUFCheckpoint
from baton.router.text.model_files import read_gguf


def main(directory: Path, file: Path) -> None:
    checkpoint, text = GGUFCheckpoint(file), read_gguf(file)
    model = checkpoint.config
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: checkpoint.read(name, [Shard(0, size, size) for size in checkpoint.shape(name)])
        .to(torch.bfloat16)
        .contiguous()
        for name in checkpoint.names()
        if name != "rope_freqs.weight"
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    eos = sorted(model.eos_ids)
    config = {
        "architectures": [model.architecture],
        "model_type": model.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_model_len,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": model.attention_bias,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    text.tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": text.special_tokens.get("eos_token"),
        "chat_template": text.chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    print(f"{directory}: {model.architecture}, {model.num_layers} layers")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gguf", type=Path, help="By default the embedded model.")
    given = parser.parse_args()
    main(given.directory, given.gguf or embedded_path())
