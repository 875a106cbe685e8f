"""Requests that make vLLM compute steps of chosen sizes, to measure them at its start. Pure.

Baton's engine runs such steps itself. vLLM lets nothing choose a step, so these requests come in rounds, each
when the one before has ended, and `mixed_steps` measures the steps of all rounds. Steps with decodes take
prompts as far as the largest CUDA graph has room, and others take what the token budget allows:

1. 1, 2, 4, … requests decode.
2. Beside one decode, a prompt in each size up to the largest graph: such steps compute prompts of agents.
3. A prompt in each larger size, alone.
4. The longest prompts decode together, for what the context costs.
5. Longer prompts, for what a chunk far behind the beginning costs.
"""

import itertools
from typing import Literal, NamedTuple

from baton.machine.learned_steps import row_sizes, token_sizes
from baton.machine.step_model import LARGE

PROMPT = 16
"""Tokens of a prompt whose decode counts."""
DECODES = 24
"""Steps that a request decodes: enough that the last ones are not beside the prompts of the round."""
CONTEXTS = 4
"""Requests that decode with a long context."""


Kind = Literal["decodes", "mixed", "prompts"]
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
    if seats > 1:
        found += [Round("mixed", (new(size - 1),)) for size in token_sizes(small)]
    larger = [size for size in token_sizes(most) if size > small or seats == 1]
    found += [Round("prompts", (new(size),)) for size in larger]
    prompts = [new(most) for _ in range(min(CONTEXTS, seats, room // (most + answer)))]
    found += [Round("prompts", (prompt,)) for prompt in prompts]
    if prompts:
        found.append(Round("decodes", tuple(prompt._replace(answer=answer) for prompt in prompts)))
    behind = [most + more for more in (most // 4, most // 2) if most + more < min(longest, room)]
    return found + [Round("prompts", (prompts[0]._replace(tokens=tokens),)) for tokens in behind if prompts]
