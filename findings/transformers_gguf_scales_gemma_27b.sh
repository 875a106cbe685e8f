#!/usr/bin/env bash
# transformers 5.23.0: Gemma 2 27B and Gemma 3 27B from a GGUF file attend with another scale than they were trained with.
#
# Gemma's configuration has the scale of attention as `query_pre_attn_scalar`: 256, as wide as a head, in smaller models,
# but 144 in Gemma 2 27B and 168 in Gemma 3 27B. Their GGUF files have no key for it: llama.cpp knows the 27B models by
# their 46 and 62 layers, and scales by the width of the model per head. transformers takes its default, 256, for
# every file, without a warning, so that each product of query and key is 0.75 or 0.81 of what it should be.
#
# Seen: largest difference between the log-probabilities of llama.cpp (xllamacpp 2026.10.11549) and of transformers after
# 40 tokens, with random weights, as loaded, and with query_pre_attn_scalar set by hand:
#     gemma2, 42 layers, heads of 256   below 0.1
#     gemma2, 46 layers, 288 / 2 heads  1.4        144: below 0.1
#     gemma3, 48 layers, heads of 256   below 0.1
#     gemma3, 62 layers, 336 / 2 heads  1.2        168: below 0.1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 gguf==0.19.0 numpy==2.4.2 accelerate==1.15.0 xllamacpp==2026.10.11549
cat > "$folder/try.py" <<'PY'
import json, os, sys, urllib.request
from pathlib import Path

import gguf, numpy, torch, xllamacpp
from transformers import AutoConfig, AutoModelForCausalLM

folder, family = Path(sys.argv[1]), sys.argv[2]
layers, hidden, width, scalar = map(int, sys.argv[3:])
random = numpy.random.default_rng(0)
file = gguf.GGUFWriter(folder / "model.gguf", family)
file.add_context_length(512), file.add_embedding_length(hidden), file.add_block_count(layers), file.add_vocab_size(64)
file.add_feed_forward_length(96), file.add_head_count(2), file.add_head_count_kv(2), file.add_sliding_window(64)
file.add_key_length(width), file.add_value_length(width), file.add_rope_dimension_count(width)
file.add_layer_norm_rms_eps(1e-5), file.add_rope_freq_base(10_000.0 if family == "gemma2" else 1_000_000.0)
if family == "gemma2":
    file.add_attn_logit_softcapping(50.0), file.add_final_logit_softcapping(30.0)
file.add_tokenizer_model("gpt2"), file.add_tokenizer_pre("gpt-2"), file.add_token_list([f"t{i}" for i in range(64)])
file.add_token_types([1] * 64), file.add_token_merges(["t 1"]), file.add_bos_token_id(0), file.add_eos_token_id(63)
norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
square = {"attn_q": (2 * width, hidden), "attn_k": (2 * width, hidden), "attn_v": (2 * width, hidden)}
square |= {"attn_output": (hidden, 2 * width), "ffn_gate": (96, hidden), "ffn_up": (96, hidden), "ffn_down": (hidden, 96)}
tensors = {"token_embd": random.normal(0, 0.3, (64, hidden)), "output_norm": random.normal(1, 0.2, hidden)}
for block in range(layers):
    for name in norms:
        tensors[f"blk.{block}.{name}"] = random.normal(1, 0.2, hidden)
    for name, shape in square.items():
        tensors[f"blk.{block}.{name}"] = random.normal(0, 0.05 if name in ("attn_q", "attn_k") else 0.3, shape)
    if family == "gemma3":
        tensors[f"blk.{block}.attn_q_norm"] = random.normal(1, 0.2, width)
        tensors[f"blk.{block}.attn_k_norm"] = random.normal(1, 0.2, width)
for name, tensor in tensors.items():
    file.add_tensor(f"{name}.weight", tensor.astype(numpy.float32))
file.write_header_to_file(), file.write_kv_data_to_file(), file.write_tensors_to_file(), file.close()
prompt = random.integers(1, 60, 40).tolist()

parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_gpu_layers = str(folder / "model.gguf"), 512, 0
parameters.warmup = parameters.fit_params = False
server = xllamacpp.Server(parameters)
body = json.dumps({"prompt": prompt, "n_predict": 1, "n_probs": 64, "temperature": 1.0}).encode()
request = urllib.request.Request(f"{server.listening_address}/completion", body, {"Content-Type": "application/json"})
rows = json.load(urllib.request.urlopen(request))["completion_probabilities"][0]["top_logprobs"]
theirs = torch.tensor([row["logprob"] for row in sorted(rows, key=lambda row: row["id"])])


def difference(**changes: int) -> float:
    config = AutoConfig.from_pretrained(folder, gguf_file="model.gguf", **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", config=config, dtype=torch.float32)
    with torch.no_grad():
        return (model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) - theirs).abs().max().item()


loaded, by_hand = difference(), difference(query_pre_attn_scalar=scalar)
said = ["below 0.1" if value < 0.1 else f"{value:.1f}" for value in (loaded, by_hand)]
print(family, layers, "layers, as loaded", said[0], "with", scalar, said[1], flush=True)
os._exit(len(rows) != 64 or by_hand >= 0.1 or (loaded < 0.1) != (scalar == 256))  # threads of the server never end
PY
for row in "gemma2 42 64 256 256" "gemma2 46 288 128 144" "gemma3 48 64 256 256" "gemma3 62 336 128 168"; do
    "$folder/venv/bin/python" "$folder/try.py" "$folder" $row 2> "$folder/errors" || { tail -5 "$folder/errors"; exit 1; }
done
