#!/usr/bin/env bash
# transformers 5.23.0: Nemotron-H's Mamba-2 layers never read `time_step_limit`; `time_step_min` bounds time steps instead.
#
# `time_step_min` (0.001) is where training begins: it initializes dt_bias. NVIDIA's published modeling_nemotron_h.py
# bounds time steps by `time_step_limit`, which is (0, inf) in published checkpoints, so the weights were trained without
# a bound. With NVIDIA-Nemotron-3-Nano-30B-A3B and 2,048 tokens the mean KL divergence from the published code is 0.034
# with transformers' bound and 0.003 without (huggingface/transformers, pull request 48989, open).
#
# Seen: logits do not change with time_step_limit (0, inf) → (0.5, 1), and change with time_step_min 0.001 → 0.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cat > "$folder/try.py" <<'PY'
import sys
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

tiny = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, layers_block_type=["mamba", "attention"],
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, mamba_num_heads=4, mamba_head_dim=16,
    n_groups=1, ssm_state_size=16, initializer_range=0.4,
)

def logits(**settings):
    torch.manual_seed(0)
    model = NemotronHForCausalLM(NemotronHConfig(**tiny, **settings)).eval()
    with torch.inference_mode():
        return model(input_ids=torch.arange(1, 20)[None], use_cache=False).logits

default = logits()
by_limit = (logits(time_step_limit=(0.5, 1.0)) - default).abs().max().item()

torch.manual_seed(0)
model = NemotronHForCausalLM(NemotronHConfig(**tiny)).eval()
torch.manual_seed(0)
bounded = NemotronHForCausalLM(NemotronHConfig(**tiny, time_step_min=0.5, time_step_max=1.0)).eval()
bounded.load_state_dict(model.state_dict())  # the same weights, so only the bound differs
with torch.inference_mode():
    by_min = (bounded(input_ids=torch.arange(1, 20)[None], use_cache=False).logits - default).abs().max().item()
print(f"time_step_limit changes logits by {by_limit}, time_step_min by {by_min}")
sys.exit(not (by_limit == 0 and by_min > 1e-6))
PY
"$folder/venv/bin/python" "$folder/try.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
