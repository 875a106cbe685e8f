#!/usr/bin/env bash
# safetensors 0.8.0: a tensor of torch.float4_e2m1fn_x2 can be saved and loaded, but no slice of it can be read.
#
# Torch counts pairs of 4-bit numbers, and a file with dtype F4 counts numbers, so its last dimension is twice as long.
# `load_file` and `get_tensor` halve it. `get_slice` gives the shape of the file and then fails for every index, also for
# `[:]`, so a loader that reads each rank's rows alone (tensor parallelism) must read the whole tensor, or its bytes.
#
# Seen: saved [4, 8], in the file [4, 16], loaded [4, 8], slice: shape '[4, 16]' is invalid for input of size 32
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 torch==2.13.0 numpy==2.4.2
cat > "$folder/try.py" <<'PY'
import sys
import safetensors.torch, torch
from safetensors import safe_open

path = sys.argv[1] + "/tensors.safetensors"
tensor = torch.arange(32, dtype=torch.uint8).reshape(4, 8).view(torch.float4_e2m1fn_x2)
safetensors.torch.save_file({"x": tensor}, path)
with safe_open(path, "pt") as file:
    whole, part = file.get_tensor("x"), file.get_slice("x")
    try:
        said = str(part[:].shape)
    except RuntimeError as error:
        said = str(error)
    print(f"saved {list(tensor.shape)}, in the file {part.get_shape()}, loaded {list(whole.shape)}, slice: {said}")
    sys.exit(part.get_shape() != [4, 16] or whole.shape != tensor.shape or "is invalid for input" not in said)
PY
"$folder/venv/bin/python" "$folder/try.py" "$folder"
