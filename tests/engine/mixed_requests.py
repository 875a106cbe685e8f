"""A batch with every kind of request.

`python -m tests.engine.mixed_requests MODEL RANKS` prints its tokens as JSON, from an engine on GPUs.
"""

import json
import sys
from typing import Any

from baton.bench.lab.engine.on_ranks import running
from baton.engine import EngineConfig, EngineRequest, StructuredOutput
from tests.engine.conftest import request_of, run

SMALL_POOL: dict[str, Any] = {
    "dtype": "float32", "block_size": 4, "num_blocks": 30, "enable_prefix_caching": True, "overlap": True,
}  # fmt: skip
"""The batch shares prefixes, and some requests are preempted."""


def mixed_requests() -> list[EngineRequest]:
    """Penalties, bias, grammars, logprobs, seeds and shared prefixes, for the spelled model."""
    shared = [(13 * j) % 190 + 3 for j in range(21)]
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "ignore_eos": True},
        {"temperature": 1.0, "logprobs": 3, "presence_penalty": 0.3, "ignore_eos": True},
        {"structured_output": StructuredOutput("regex", "[a-f]{30}")},
        {"temperature": 0.8, "min_p": 0.05, "logit_bias": {7: 5.0, 9: -100.0}, "ignore_eos": True},
    ]
    return [
        request_of(i, [*shared, i + 3, i % 2 + 90], max_tokens=16, seed=i, **kinds[i % 4]) for i in range(8)
    ]


def main() -> None:
    size = int(sys.argv[2])
    config = EngineConfig(sys.argv[1], device="cuda", tensor_parallel_size=size, **SMALL_POOL)
    requests = mixed_requests()
    with running(config) as engine:
        results = run(engine, requests)
        engine.assert_whole()
        assert engine.stats().preemptions
    print(json.dumps([results[request.id].tokens for request in requests]))


if __name__ == "__main__":
    main()
