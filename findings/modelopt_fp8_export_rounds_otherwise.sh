#!/usr/bin/env bash
# nvidia-modelopt 0.47.0, on a CPU: 3 % of the FP8 weights that export_hf_checkpoint writes are not those that were evaluated.
#
# The quantizer of a model in bfloat16 rounds weight ÷ scale to the nearest FP8 number. So accuracy is measured with these.
# The export rounds once more on the way: 3.25 % of the numbers of a matrix are the next FP8 number instead, half a step or
# more from the weight.
#
# Its import needs requests, which the package does not name among what it requires.
#
# Seen: 0.0325 of the exported numbers differ from those of the quantizer, which are all the nearest ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet nvidia-modelopt==0.47.0 requests==2.34.2 transformers==5.23.0 torch==2.13.0 accelerate==1.15.0
cat > "$folder/try.py" <<'PY'
import pathlib, sys, torch
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=200, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, initializer_range=0.2, architectures=["LlamaForCausalLM"])
model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
ids = torch.randint(200, (4, 32))
model = mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda part: part(ids))
part = model.model.layers[0].mlp.down_proj
weight = part.weight.detach().clone()
evaluated = part.weight_quantizer(weight.float()).clone()
export_hf_checkpoint(model, export_dir=sys.argv[1])
stored = load_file(pathlib.Path(sys.argv[1]) / "model.safetensors")
name = "model.layers.0.mlp.down_proj.weight"
codes, scale = stored[name], stored[name + "_scale"]
nearest = (weight.float() / scale).to(torch.float8_e4m3fn)
by_quantizer = (evaluated / scale).to(torch.float8_e4m3fn)
assert torch.equal(by_quantizer.float(), nearest.float())
share = (codes.float() != by_quantizer.float()).float().mean().item()
print(f"{share:.4f} of the exported numbers differ")
sys.exit(share < 0.01)
PY
"$folder/venv/bin/python" "$folder/try.py" "$folder/out"
