#!/usr/bin/env bash
# transformers 5.23.0: `guidance_scale` with prompt lookup or an assistant gives other tokens than without.
#
# Drafts change the speed of greedy decoding, not its tokens, and `generate` takes both options. Guidance computes the
# logits once more without the prompt, and keeps a cache for that. Drafts call it for each token that an assistant or
# the prompt proposes. Where a proposed token is rejected, the model's cache is cut and that of guidance is not, so
# each later token is guided by a text that was never written. No error or warning is given. Other processors, such as
# repetition_penalty, keep nothing between tokens, and their tokens are the same.
#
# Seen: of 24 greedy tokens, those that differ from generation without drafts:
#                              prompt lookup  assistant
#     repetition_penalty=1.5    0              0
#     guidance_scale=1.5       17             21
#     guidance_scale=3.0       18             17
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cat > "$folder/try.py" <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
torch.set_num_threads(1)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
assistant = LlamaForCausalLM(model.config).eval()
with torch.no_grad():
    for weights, near in zip(model.parameters(), assistant.parameters(), strict=True):
        if weights.dim() > 1:
            weights.normal_(std=1.2 * weights.shape[-1] ** -0.5)
        near.copy_(weights + 0.02 * torch.randn_like(weights))
prompt = torch.randint(3, 64, (1, 20))
greedy = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
drafts = {"prompt lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}, "assistant": {"assistant_model": assistant}}
seen = {}
for option in {"repetition_penalty": 1.5}, {"guidance_scale": 1.5}, {"guidance_scale": 3.0}:
    plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy, **option)
    for name, draft in drafts.items():
        drafted = model.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy, **option, **draft)
        seen[*option, *option.values(), name] = (plain != drafted).sum().item()
        print(*option.items(), name, seen[*option, *option.values(), name])
sys.exit(any((count > 0) != (key[0] == "guidance_scale") for key, count in seen.items()))
PY
"$folder/venv/bin/python" "$folder/try.py"
