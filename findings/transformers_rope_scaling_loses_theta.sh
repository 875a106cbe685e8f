#!/usr/bin/env bash
# transformers 5.23.0: `rope_scaling`, added to a config.json that transformers 5 itself wrote, resets `rope_theta` to 10,000.
#
# transformers 5 writes the rotation into `rope_parameters`, with rope_theta inside. Model cards (Qwen2.5's for YaRN)
# say to add `rope_scaling` for longer prompts. It then replaces the whole of `rope_parameters`, so a model that was
# trained with a theta of 1,000,000 is rotated with the default of 10,000, without a warning. Checkpoints of
# transformers 4 have rope_theta beside both, and keep it.
#
# Seen: {'rope_type': 'yarn', 'factor': 4.0, ..., 'rope_theta': 10000.0} for the first, 1000000.0 for the second.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0
cat > "$folder/try.py" <<'PY'
import json, pathlib, sys
from transformers import AutoConfig, Qwen2Config

folder = pathlib.Path(sys.argv[1])
Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).save_pretrained(folder)
written = json.loads((folder / "config.json").read_text())
assert "rope_theta" not in written and written["rope_parameters"]["rope_theta"] == 1e6, written
scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
thetas = []
for more in ({}, {"rope_theta": 1e6}):
    (folder / "config.json").write_text(json.dumps(written | more | {"rope_scaling": scaling}))
    rotation = AutoConfig.from_pretrained(folder).rope_parameters
    print(rotation)
    thetas.append(rotation["rope_theta"])
sys.exit(thetas != [10_000.0, 1_000_000.0])
PY
"$folder/venv/bin/python" "$folder/try.py" "$folder"
