"""What a step of an engine costs: Llama-3.1-8B in bfloat16 on one H200.

Fitted to measurements: 1, 32 and 128 decodes take 4.4, 5.5 and 9.7 ms, prompts of 2,000 and 8,000 tokens 48
and 210 ms.
"""

from bisect import bisect_left
from collections.abc import Iterable

GRAPH_ROWS = (
    *range(16, 128, 16), *range(128, 256, 32), 256, 320, 384, 432, 480, *range(512, 2048, 128), 2048,
)  # fmt: skip
"""Rows of the graphs with chunks of prompts. A smaller step is padded to the next one. A larger one has no
graph."""

READ_SECONDS = 4.35e-3
"""To read the weights."""
FEW_ROWS_SECONDS = 15e-6
"""Of a row while the weights are read."""
ROW_SECONDS = 23.3e-6
"""Of a row if the device is busy with matrix products, which have a fixed cost, too."""
PRODUCTS_SECONDS = 0.8e-3
LAUNCH_SECONDS = 0.1e-3
DECODE_SECONDS = 0.033e-6
"""Of a position that the attention of a decode reads."""
PAIR_SECONDS = 0.78e-9
"""Of a pair of positions in the attention of a prompt."""


def step_seconds(decodes: int, context: int, chunks: Iterable[tuple[int, int]]) -> float:
    """Seconds of a step on the device.

    `context`: positions of all decodes. `chunks`: (tokens, position of the first token) of each chunk."""
    tokens, pairs = 0, 0.0
    for count, start in chunks:
        tokens += count
        pairs += count * (start + count / 2)
    rows = tokens + decodes
    if tokens and rows <= GRAPH_ROWS[-1]:
        rows = GRAPH_ROWS[bisect_left(GRAPH_ROWS, rows)]
    products = max(ROW_SECONDS * rows + PRODUCTS_SECONDS, READ_SECONDS + FEW_ROWS_SECONDS * rows)
    return products + context * DECODE_SECONDS + pairs * PAIR_SECONDS + LAUNCH_SECONDS
