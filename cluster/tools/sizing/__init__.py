"""`baton plan`: computes how many prefill and decode workers a load needs.

Life of an answer:

1. `speeds` estimates the duration of prefills and decode steps, from measurements of one model on one GPU.
2. `simulated` runs Poisson arrivals through the router's policy and simulated prefill workers
   (`simulator`), and through the steps of one decode worker.
3. `answer` searches the smallest pools that meet the targets, and explains what limits them.
4. `command` prints the answer.

The model leaves out prefix caches and overflow, which reduce the real need. It also leaves out the router's
own millisecond and the cost of injected KV in decode steps, which increase the real need.
"""

import json
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text()) for file in sorted(Path(__file__).with_name("models").iterdir())
}
"""The config.json of each model that is known by name."""
