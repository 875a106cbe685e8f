"""Where tests put tensors: `BATON_TEST_DEVICE=cuda` runs the same tests on a GPU."""

import os

DEVICE = os.environ.get("BATON_TEST_DEVICE", "cpu")


TWO = {} if DEVICE == "cpu" else {"CUDA_VISIBLE_DEVICES": "0,1"}
"""What a worker with two ranks has in its environment."""


def environment(role: str) -> dict[str, str]:
    """What a worker of this role adds to its environment: with two GPUs each role has its own."""
    if DEVICE == "cpu":
        return {}
    import torch

    return {"CUDA_VISIBLE_DEVICES": str(min(torch.cuda.device_count(), 2) - 1 if role == "decode" else 0)}
