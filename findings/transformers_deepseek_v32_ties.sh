#!/usr/bin/env bash
# transformers 5.23.0: with few index heads, greedy tokens of DeepSeek-V3.2 differ with and without a cache.
#
# A head's index score is a weight times ReLU(q · k), so with one head about half of the positions score zero. These are
# the largest where the weight is below zero. Then topk chooses among ties, and chooses others in a pass of all tokens
# than in a pass of one. With 64 heads, as in published checkpoints, no sum is zero, and both passes choose alike.
#
# Seen: with 1 index head 3 of 12 greedy tokens differ, with 64 none does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cat > "$folder/try.py" <<'PY'
import sys
import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

tiny = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    index_head_dim=16, index_topk=8, first_k_dense_replace=1, initializer_range=0.4,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)
FIRST, ALL = 40, 52

@torch.inference_mode()
def differing(heads):
    torch.manual_seed(0)
    model = DeepseekV32ForCausalLM(DeepseekV32Config(**tiny, index_n_heads=heads)).eval()
    ids = torch.randint(2, 64, (1, ALL))
    whole = model(input_ids=ids, use_cache=False).logits[0, FIRST:].argmax(-1)
    cache = model(input_ids=ids[:, :FIRST], use_cache=True).past_key_values
    one_by_one = [
        model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits[0, -1].argmax()
        for i in range(FIRST, ALL)
    ]
    return int((torch.stack(one_by_one) != whole).sum())

few, many = differing(1), differing(64)
print(f"greedy tokens that differ with a cache: {few} with 1 index head, {many} with 64")
sys.exit(not (few > 0 and many == 0))
PY
"$folder/venv/bin/python" "$folder/try.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
