"""`baton plan`: computes how many prefill and decode workers a load needs.

Life of an answer:

1. `speeds` estimates the duration of prefills and decode steps, from measurements of one model on one GPU.
2. `simulated` runs a load through the router's policy, and through the steps of all workers (`simulator`).
3. `answer` searches the smallest pools that meet the targets, and explains what limits them.
4. `images` adds the time of images, and says whether encoders of their own pay.
5. `command` prints the answer.

The model leaves out what the router and the client cost beyond a few milliseconds for each request. It also
leaves out that a GPU under full load is slower than one that was idle before. Only agents
have cached prefixes.
"""

import json
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text()) for file in sorted(Path(__file__).with_name("models").iterdir())
}
"""The config.json of each model that is known by name."""

STEP_MODEL = "step_model"
"""In the detail of a report of `bench.engine`: the fields of the engine's `StepModel`."""
ENCODE_TOKEN_SECONDS = "encode_token_seconds"
"""There, too: of the engine's encoder, for each token of an image."""
