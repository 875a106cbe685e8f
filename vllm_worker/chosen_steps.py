"""Requests that make vLLM compute steps of chosen sizes, to measure them at its start. Pure.

Baton's engine runs such steps itself. vLLM lets nothing choose a step, so these requests come in rounds, each
when the one before has ended, and `mixed_steps` measures the steps of all rounds. Steps with decodes take
prompts as far as the largest CUDA graph has room, and others take what the token budget allows:

1. 1, 2, 4, … requests decode.
2. Beside one decode, a prompt in each size up to the largest graph: such steps compute prompts of agents.
3. A prompt in each larger size, alone.
4. Prompts that go on behind the largest of these, for what a chunk far behind the beginning costs.
5. Many long prompts decode together, for what the context costs.
"""

import itertools
from typing import Literal, NamedTuple

from baton.steps.learned_steps import row_sizes, token_sizes
from baton.steps.step_model import LARGE

PROMPT = 16
"""Tokens of each prompt in a round of decodes."""
DECODES = 24
"""Steps that a request decodes: enough that the last ones are not beside the prompts of the round."""
TIMES = 3
"""A step with a prompt is measured so often, and the median counts."""
CONTEXT = 2_048
"""Tokens of a prompt that decodes with a long context."""
CONTEXTS = 32
"""Of these: enough to read as fast as the memory allows."""
Kind = Literal["decodes", "mixed", "prompts", "nothing"]
"""Steps of a round that count: those that only decode, those with both, or those with prompts alone."""


class Chosen(NamedTuple):
    """A request. `number`: those with the same one have a common prefix, as long as the shorter."""

    number: int
    tokens: int
    answer: int


class Round(NamedTuple):
    """Requests that come together.

    Attributes:
        counts: the steps that count. With "mixed", one other request decodes all the time.
    """

    counts: Kind
    requests: tuple[Chosen, ...]


def rounds(
    *, seats: int, budget: int, graph: int, longest: int, block: int, room: int, drafts: int = 0
) -> list[Round]:
    """Empty: the smallest do not fit.

    `seats`: most requests. `budget`: most tokens of a step. `graph`: those of the largest CUDA graph, or 0.
    `longest`: most tokens of a prompt with its answer. `block`, `room`: tokens of a block, and of all that
    there is memory for. `drafts`: of a decode in a step."""
    answer = DECODES * (1 + drafts)
    most, each = min(budget, longest - answer, room), -(-(PROMPT + answer) // block) * block
    if most < PROMPT or room < each:
        return []
    small = min(graph or LARGE, most)
    numbers = itertools.count()

    def new(tokens: int, answer: int = 1) -> Chosen:
        return Chosen(next(numbers), tokens, answer)

    rows = row_sizes(min(seats, room // each))
    found = [Round("decodes", tuple(new(PROMPT, answer) for _ in range(size))) for size in rows]
    sizes = [size for size in token_sizes(small) if seats > 1 for _ in range(TIMES)]
    found += [Round("mixed", (new(size - 1),)) for size in sizes]
    sizes = [size for size in token_sizes(most) if size > small or seats == 1 for _ in range(TIMES)]
    found += [Round("prompts", (new(size),)) for size in sizes]
    largest = [requests[0] for _, requests in found if requests[0].tokens == most]
    if (longer := most + most // 4) < min(longest, room):
        found += [Round("prompts", (prompt._replace(tokens=longer),)) for prompt in largest]
    context = min(CONTEXT, most)
    contexts = tuple(new(context) for _ in range(min(CONTEXTS, seats, room // (context + answer + block))))
    if contexts:
        decoding = tuple(prompt._replace(answer=answer) for prompt in contexts)
        found += [Round("nothing", contexts), Round("decodes", decoding)]
    return found
