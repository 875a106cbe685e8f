#!/usr/bin/env bash
# transformers 5.23.0: a GGUF file loses every scaling of its rotary positions, without a warning.
#
# A GGUF file has YaRN and linear scaling in the keys `ARCHITECTURE.rope.scaling.*`, and Llama 3.1, 3.2 and 3.3's
# scaling as the tensor `rope_freqs.weight`, by which frequencies are divided. transformers reads no such key but
# gpt-oss's, and leaves the tensor out, as it does with each tensor that its model has no weight for. So a long
# prompt is rotated as if the model had not been extended, while max_position_embeddings promises the long context.
# The same checkpoint in safetensors, and llama.cpp with the same file, scale the positions.
#
# Seen: largest difference between the log-probabilities of llama.cpp (xllamacpp 2026.10.11549) and of transformers
# after 200 tokens with random weights, and the rotation that transformers loaded:
#     llama, no scaling          below 0.1   default
#     llama, rope_freqs.weight   20.6        default
#     llama, linear, factor 8    20.6        default
#     qwen2, no scaling          below 0.1   default
#     qwen2, YaRN, factor 8      21.9        default
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 gguf==0.19.0 numpy==2.4.2 accelerate==1.15.0 xllamacpp==2026.10.11549
cat > "$folder/try.py" <<'PY'
import json, os, sys, urllib.request
from pathlib import Path

import gguf, numpy, torch, xllamacpp
from transformers import AutoModelForCausalLM

folder, family, scaling = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
random = numpy.random.default_rng(0)
file = gguf.GGUFWriter(folder / "model.gguf", family)
file.add_context_length(512), file.add_embedding_length(32), file.add_block_count(2), file.add_feed_forward_length(32)
file.add_head_count(2), file.add_head_count_kv(2), file.add_rope_dimension_count(16), file.add_vocab_size(64)
file.add_layer_norm_rms_eps(1e-5), file.add_rope_freq_base(500_000.0)
file.add_tokenizer_model("gpt2"), file.add_tokenizer_pre("gpt-2"), file.add_token_list([f"t{i}" for i in range(64)])
file.add_token_types([1] * 64), file.add_token_merges(["t 1"]), file.add_bos_token_id(0), file.add_eos_token_id(63)
if scaling == "rope_freqs":
    file.add_tensor("rope_freqs.weight", numpy.full(8, 8, numpy.float32))
elif scaling != "none":
    file.add_rope_scaling_type(gguf.RopeScalingType(scaling)), file.add_rope_scaling_factor(8.0)
    file.add_rope_scaling_orig_ctx_len(64)
tensors = {"token_embd.weight": random.normal(size=(64, 32)), "output.weight": random.normal(size=(64, 32))}
tensors["output_norm.weight"] = numpy.ones(32)
for block in "blk.0", "blk.1":
    for layer in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        tensors[f"{block}.{layer}.weight"] = random.normal(0, 0.4, (32, 32))
        if family == "qwen2" and layer in ("attn_q", "attn_k", "attn_v"):
            tensors[f"{block}.{layer}.bias"] = numpy.zeros(32)
    tensors[f"{block}.attn_norm.weight"] = tensors[f"{block}.ffn_norm.weight"] = numpy.ones(32)
for name, tensor in tensors.items():
    file.add_tensor(name, tensor.astype(numpy.float32))
file.write_header_to_file(), file.write_kv_data_to_file(), file.write_tensors_to_file(), file.close()
prompt = random.integers(1, 60, 200).tolist()

parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_gpu_layers = str(folder / "model.gguf"), 512, 0
parameters.warmup = parameters.fit_params = False
server = xllamacpp.Server(parameters)
body = json.dumps({"prompt": prompt, "n_predict": 1, "n_probs": 64, "temperature": 1.0}).encode()
request = urllib.request.Request(f"{server.listening_address}/completion", body, {"Content-Type": "application/json"})
rows = json.load(urllib.request.urlopen(request))["completion_probabilities"][0]["top_logprobs"]
theirs = torch.tensor([row["logprob"] for row in sorted(rows, key=lambda row: row["id"])])
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
with torch.no_grad():
    difference = (model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) - theirs).abs().max().item()
seen = "below 0.1" if difference < 0.1 else f"{difference:.1f}"
print(family, scaling, seen, model.config.rope_parameters["rope_type"], flush=True)
good = len(rows) == 64 and model.config.rope_parameters["rope_type"] == "default"
os._exit(not good or (difference < 0.1 if scaling != "none" else difference >= 0.1))  # threads of the server never end
PY
for row in "llama none" "llama rope_freqs" "llama linear" "qwen2 none" "qwen2 yarn"; do
    "$folder/venv/bin/python" "$folder/try.py" "$folder" $row 2> "$folder/errors" || { tail -5 "$folder/errors"; exit 1; }
done
