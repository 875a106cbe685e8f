#!/usr/bin/env bash
# transformers 5.23.0: Mamba and Falcon-Mamba forget their cache if the next tokens are more than one.
#
# A prompt may be passed in parts, each with the cache that the one before returned: so prompts are computed in chunks, and a
# conversation goes on. These classes start the convolution and the scan from zeros in a part of several tokens, and raise
# nothing. One token at a time is right. Mamba-2, in the same library, is right with parts of any length.
#
# Seen, the largest difference of the last logits from those of one pass, by the largest logit, for 12 and 8 tokens, then for
# 12 and 8 times one: Mamba 1.8e-04 and 1.5e-07, Falcon-Mamba 4.8e-02 and 9.5e-08, Mamba-2 1.5e-07 and 3.0e-07.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cat > "$folder/try.py" <<'PY'
import sys
import torch, transformers
from transformers import FalconMambaConfig, FalconMambaForCausalLM, Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
ids = torch.randint(0, 100, (1, 20))
sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
models = [
    MambaForCausalLM(MambaConfig(**sizes)),
    FalconMambaForCausalLM(FalconMambaConfig(**sizes)),
    Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=4, head_dim=16, n_groups=1)),
]


@torch.no_grad()
def difference(model, parts):
    whole = model(ids, use_cache=False).logits[0, -1]
    cache, start = None, 0
    for tokens in parts:
        out = model(ids[:, start : start + tokens], cache_params=cache, use_cache=True)
        cache, start = out.cache_params, start + tokens
    return ((out.logits[0, -1] - whole).abs().max() / whole.abs().max()).item()


forget = []
for model in models:
    in_two, by_one = difference(model.eval(), (12, 8)), difference(model, (12, *[1] * 8))
    print(f"{type(model).__name__}: 12 and 8 tokens {in_two:.1e}, 12 and 8 times one {by_one:.1e}")
    assert by_one < 1e-5
    forget.append(in_two > 5e-5)
sys.exit(forget != [True, True, False])
PY
"$folder/venv/bin/python" "$folder/try.py"
