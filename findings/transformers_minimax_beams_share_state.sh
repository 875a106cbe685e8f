#!/usr/bin/env bash
# transformers 5.23.0: beam search with MiniMax gives other tokens with its cache than without; a beam keeps another's state.
#
# After each token, beam search copies the cache of the beams that go on over those of the beams that end. MiniMax's
# cache reorders the keys and values of its layers of full attention, and not the states of its layers of linear
# attention. These then belong to another beam's text, without a warning. Greedy search is right.
#
# Seen: of 12 tokens, 0 differ between cache and no cache with one beam, and 9 with three beams.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cat > "$folder/try.py" <<'PY'
import sys

import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM

sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16}
torch.manual_seed(0)
model = MiniMaxForCausalLM(MiniMaxConfig(**sizes, **heads)).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        weight.data.normal_(0, 0.3)
prompt = torch.randint(3, 128, (1, 24))
differ = []
for beams in 1, 3:
    rules = {"num_beams": beams, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    differ.append((model.generate(prompt, **rules) != model.generate(prompt, use_cache=False, **rules)).sum().item())
print(f"{differ[0]} of 12 tokens differ with one beam, {differ[1]} with three")
sys.exit(differ[0] != 0 or differ[1] == 0)
PY
"$folder/venv/bin/python" "$folder/try.py" 2>/dev/null
