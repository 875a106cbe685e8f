#!/usr/bin/env bash
# transformers 5.23.0: AutoModelForCausalLM does not know Mistral 4, though transformers has Mistral4ForCausalLM.
#
# The class stands in the table of models that see images (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES), and not in that
# of causal language models. A program that looks classes up by the type of a configuration finds none.
#
# Seen: ValueError: Unrecognized configuration class Mistral4Config for this kind of AutoModel: AutoModelForCausalLM.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cat > "$folder/try.py" <<'PY'
import sys
from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

config = Mistral4Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
)
Mistral4ForCausalLM(config)
try:
    AutoModelForCausalLM.from_config(config)
except ValueError as error:
    print(str(error)[:150])
    sys.exit("AutoModelForCausalLM" not in str(error))
sys.exit("AutoModelForCausalLM knows Mistral 4")
PY
"$folder/venv/bin/python" "$folder/try.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
