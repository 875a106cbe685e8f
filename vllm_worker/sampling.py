"""A request of Baton as vLLM's, and vLLM's tokens and log probabilities as Baton's. Without vLLM itself.

vLLM's prompt is prompt and output so far. What depends on the output alone cannot go on from there, and is
refused by name.
"""

import json
from array import array
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

from baton.engine import EngineRequest, Logprobs, Output, PromptLogprobs, Reasoning, StructuredOutput
from baton.engine.api.request import PROMPT_PIECE
from baton.grammars.compiler import WHITESPACE, source

_SAME = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "ignore_eos",
)  # fmt: skip
"""Fields that vLLM takes as they are."""
_SEED_STEP = 0x9E37_79B9_7F4A_7C15
"""Golden ratio: seeds of one request at different lengths have nothing in common."""


def sampling(request: EngineRequest, *, only_first: bool, scores_prompt: bool) -> dict[str, Any]:
    """Returns the fields of vLLM's SamplingParams. Raises ValueError for what vLLM cannot do.

    Args:
        only_first: the worker samples one token, since another worker goes on.
        scores_prompt: it computes the prompt, and returns log probabilities if they are asked for.
    """
    params, emitted = request.sampling, len(request.output_ids)
    _check(request)
    most = 1 if only_first else params.max_tokens - emitted
    fields: dict[str, Any] = {name: getattr(params, name) for name in _SAME} | {
        "max_tokens": most,
        "min_tokens": min(most, max(0, params.min_tokens - emitted)),
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": dict(params.logit_bias) or None,
        "allowed_token_ids": list(params.allowed_token_ids) or None,
        # `bad_words` are texts there, which it turns into these.
        "_bad_words_token_ids": [list(word) for word in params.bad_words] or None,
        "detokenize": False,
        "flat_logprobs": True,
    }
    if params.temperature:
        # Its generator starts anew, so that another length must have another seed.
        fields["seed"] = (params.seed + emitted * _SEED_STEP) & 0x7FFF_FFFF_FFFF_FFFF
    if params.logprob_token_ids and params.logprobs is not None:
        fields["logprob_token_ids"] = list(params.logprob_token_ids)
    else:
        fields["logprobs"] = params.logprobs
    if scores_prompt:
        fields["prompt_logprobs"] = params.prompt_logprobs
    if (structure := params.structured_output) is not None:
        fields["structured_outputs"] = structure_fields(structure)
    return fields


def structure_fields(structure: StructuredOutput) -> dict[str, str]:
    """Returns the fields of vLLM's StructuredOutputsParams. Its backend `guidance` reads all kinds as Baton's
    engine does."""
    if structure.kind == "json_schema":
        schema = json.loads(structure.text)
        if isinstance(schema, dict):
            schema.setdefault("x-guidance", {"whitespace_pattern": WHITESPACE})
        return {"json": json.dumps(schema)}
    return {structure.kind: structure.text}


def after_reasoning(
    structure: dict[str, str] | None, reasoning: Reasoning, eos_ids: Collection[int]
) -> dict[str, str]:
    """Returns the fields of a grammar for the reasoning and what follows. None as `structure`: any tokens.

    llguidance counts the tokens of a reasoning, and finds its end, by their numbers
    (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md#special-tokens)."""
    most, begin, end = reasoning.budget, reasoning.start_id, f"<[{reasoning.end_id}]>"
    ends = {reasoning.end_id, *(eos_ids if structure is not None else ())}
    other = f"<[^{','.join(map(str, sorted(ends)))}]>"
    times = "*" if most is None else f"{{0,{most}}}"
    start = f"{end} answer" if most == 0 else f"{other}{times} {end} answer"  # it reads no {0,0}
    if begin is not None:
        start = f"<[{begin}]> {start} | {f'<[^{begin}]> ' if structure is None else ''}answer"
    return {"grammar": f"start: {start}\nanswer: {_rule(structure)}"}


def _rule(structure: dict[str, str] | None) -> str:
    """Returns the body of a rule in Lark. `structure`: of `after_reasoning`."""
    if structure is None:
        return "<[*]>*"
    [(kind, text)] = structure.items()
    if kind == "json":
        return f"%json {text}"
    if kind == "regex":
        [lark] = json.loads(source(kind, text))["grammars"]
        text = lark["lark_grammar"]
    return f"%lark {{\n{text}\n}}"


def _check(request: EngineRequest) -> None:
    params = request.sampling
    if request.output_ids:
        lost = {
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "structured_output": params.structured_output,
            "reasoning": params.reasoning,
        }
        if names := [name for name, value in lost.items() if value]:
            raise ValueError(
                f"{', '.join(names)}: a vLLM worker cannot continue an output that another worker began"
            )


def tokens(
    request: EngineRequest, index: int, output: Any, reason: str, *, prefilled: bool
) -> Iterator[Output]:
    """Yields the tokens of vLLM's RequestOutput.

    Args:
        index: of the first of them.
        reason: why the request ends with the last of them. Empty: it goes on.
        prefilled: the first of them follows a prefill here.
    """
    [completion], alternatives = output.outputs, request.sampling.num_alternatives
    ids, times, queued, computing = completion.token_ids, output.metrics, 0.0, 0.0
    if times is not None and prefilled:
        queued = max(0.0, times.scheduled_ts - times.queued_ts)
        computing = max(0.0, times.first_token_ts - times.scheduled_ts)
    for i, token in enumerate(ids):
        logprobs = logprobs_at(completion.logprobs, i, alternatives) if completion.logprobs else None
        last, cached = reason if i == len(ids) - 1 else "", output.num_cached_tokens or 0
        yield Output(request.id, index + i, token, logprobs, last, cached, queued, computing)
        queued = computing = 0.0


def logprobs_at(flat: Any, position: int, alternatives: int) -> Logprobs:
    """Returns the log probabilities of the token at `position`. `flat`: vLLM's FlatLogprobs."""
    start, stop = flat.start_indices[position], flat.end_indices[position]
    stop = min(stop, start + 1 + alternatives)
    ids, values = flat.token_ids[start + 1 : stop], flat.logprobs[start + 1 : stop]
    return Logprobs(flat.logprobs[start], tuple(ids), tuple(values))


def prompt_logprobs(request: EngineRequest, flat: Any) -> Iterator[PromptLogprobs]:
    """Yields the log probabilities of a prompt, in pieces that a router can take. `flat` as above."""
    prompt_tokens, alternatives = len(request.prompt_ids), request.sampling.prompt_logprobs or 0
    for first in range(1, prompt_tokens, PROMPT_PIECE):
        starts = flat.start_indices[first : min(first + PROMPT_PIECE, prompt_tokens)]
        tops = [slice(start + 1, start + 1 + alternatives) for start in starts]
        yield PromptLogprobs(
            request.id,
            first,
            array("f", [flat.logprobs[start] for start in starts]).tobytes(),
            array("i", [flat.ranks[start] or 0 for start in starts]).tobytes(),
            array("i", chain.from_iterable(flat.token_ids[top] for top in tops)).tobytes(),
            array("f", chain.from_iterable(flat.logprobs[top] for top in tops)).tobytes(),
        )
