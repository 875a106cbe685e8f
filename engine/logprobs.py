"""The log probabilities of a landed step, in the form of the engine's results."""

from collections.abc import Sequence

from baton.engine.api.request import PROMPT_PIECE, Logprobs, PromptLogprobs
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.schedule import Chunk
from baton.engine.step import RowLogprobs, ScoredLogprobs


def of_prompts(scored: Sequence[Chunk], of_step: ScoredLogprobs) -> list[PromptLogprobs]:
    """Log probabilities of the prompts of the requests that have not ended meanwhile. Notes in each request
    how much of its prompt is scored."""
    result = []
    row = 0
    for live, start, stop, _ in scored:
        wanted = live.request.sampling.prompt_logprobs or 0
        for first in range(start, stop, PROMPT_PIECE) if live.phase is not Phase.GONE else ():
            end = min(first + PROMPT_PIECE, stop)
            logprobs, ranks, ids, values = (x[row + first - start : row + end - start] for x in of_step)
            result.append(
                PromptLogprobs(
                    live.id,
                    first + 1,
                    logprobs.tobytes(),
                    ranks.tobytes(),
                    ids[:, :wanted].tobytes(),
                    values[:, :wanted].tobytes(),
                )
            )
        live.num_scored = stop
        row += stop - start
    return result


def of_outputs(sampled: Sequence[LiveRequest], rows: RowLogprobs | None) -> dict[int, Logprobs]:
    """Log probabilities of the sampled tokens, by row, of the requests that ask for them."""
    if rows is None:
        return {}
    asked = [row for row, live in enumerate(sampled) if live.request.sampling.logprobs is not None]
    result = {}
    for row, chosen, ids, values in zip(asked, rows.chosen, rows.ids, rows.values, strict=True):
        wanted = sampled[row].request.sampling.num_alternatives
        result[row] = Logprobs(chosen, tuple(ids[:wanted]), tuple(values[:wanted]))
    return result
