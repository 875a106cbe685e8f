#!/usr/bin/env bash
# transformers 5.23.0: a GGUF file's rules for splitting text are GPT-2's, without a warning, for most names of rules.
#
# A GGUF file has its vocabulary and merges, and only a name of the rules that split text before the merges
# (`tokenizer.ggml.pre`). llama.cpp knows some sixty names. transformers knows 23, and splits for all others as GPT-2
# does, whose numbers are whole. Falcon, GLM-4, DeepSeek-V3 and Hunyuan learned their merges on groups of three
# digits, so numbers become other tokens than the model was trained with. Where it knows the rules, it may
# lack the token that begins a text: llama.cpp adds BOS for "llama-bpe" and "tekken" if the file does not say.
#
# Seen for "12345", with merges for 45, 345, 12 and 123 in this order; llama.cpp (xllamacpp 2026.10.11549), then
# transformers:
#     falcon       ['123', '45']           ['12', '345']
#     glm4         ['123', '45']           ['12', '345']
#     deepseek-v3  ['123', '45']           ['12', '345']
#     starcoder    ['1', '2', '3', '4', '5']  ['12', '345']
#     gpt-4o       ['123', '45']           ['123', '45']
#     llama-bpe    ['<end>', '123', '45']  ['123', '45']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 gguf==0.19.0 xllamacpp==2026.10.11549
cat > "$folder/try.py" <<'PY'
import json, os, sys, urllib.request
from pathlib import Path

import gguf, numpy, xllamacpp
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

folder, name = Path(sys.argv[1]), sys.argv[2]
tokens = [*bytes_to_unicode().values(), "45", "345", "12", "123", "<end>"]
file = gguf.GGUFWriter(folder / "model.gguf", "llama")
file.add_context_length(128), file.add_embedding_length(32), file.add_block_count(1), file.add_feed_forward_length(32)
file.add_head_count(2), file.add_head_count_kv(2), file.add_rope_dimension_count(16), file.add_vocab_size(len(tokens))
file.add_layer_norm_rms_eps(1e-5), file.add_tokenizer_model("gpt2"), file.add_tokenizer_pre(name)
file.add_token_list(tokens), file.add_token_types([1] * (len(tokens) - 1) + [3])
file.add_token_merges(["4 5", "3 45", "1 2", "12 3"])
file.add_bos_token_id(len(tokens) - 1), file.add_eos_token_id(len(tokens) - 1)
square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
shapes = {"token_embd": (len(tokens), 32), "output_norm": 32, "blk.0.attn_norm": 32, "blk.0.ffn_norm": 32}
for tensor, shape in (shapes | {f"blk.0.{layer}": (32, 32) for layer in square}).items():
    file.add_tensor(f"{tensor}.weight", numpy.zeros(shape, numpy.float32))
file.write_header_to_file(), file.write_kv_data_to_file(), file.write_tensors_to_file(), file.close()

parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_gpu_layers = str(folder / "model.gguf"), 64, 0
parameters.warmup = parameters.fit_params = False
server = xllamacpp.Server(parameters)
body = json.dumps({"content": "12345", "add_special": True}).encode()
request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
theirs = [tokens[token] for token in json.load(urllib.request.urlopen(request))["tokens"]]
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
print(name, theirs, tokenizer.convert_ids_to_tokens(tokenizer("12345").input_ids), flush=True)
os._exit(0)  # threads of the server never end
PY
for name in falcon glm4 deepseek-v3 starcoder gpt-4o llama-bpe; do
    "$folder/venv/bin/python" "$folder/try.py" "$folder" "$name" 2>/dev/null
done | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
falcon ['123', '45'] ['12', '345']
glm4 ['123', '45'] ['12', '345']
deepseek-v3 ['123', '45'] ['12', '345']
starcoder ['1', '2', '3', '4', '5'] ['12', '345']
gpt-4o ['123', '45'] ['123', '45']
llama-bpe ['<end>', '123', '45'] ['123', '45']
SEEN
