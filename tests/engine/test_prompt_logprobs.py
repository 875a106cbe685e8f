"""Log probabilities of prompts, against transformers in float32."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine import Engine, EngineRequest, PromptLogprobs
from tests.engine.conftest import request_of, run
from tests.engine.scheduling import end

RNG = random.Random(3)
LONG, SHORT, OTHER = ([RNG.randrange(3, 199) for _ in range(n)] for n in (50, 7, 23))
CONFIG = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Callable[[list[int]], torch.Tensor]:
    """Log probabilities [tokens, vocabulary] after each token of a prompt."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(prompt: list[int]) -> torch.Tensor:
        return model(torch.tensor([prompt])).logits[0].log_softmax(-1)

    return logprobs


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.execution.sampler.PIECE", 5)
    monkeypatch.setattr("baton.engine.outputs.PROMPT_PIECE", 6)


def scores(
    engine: Engine, requests: Sequence[EngineRequest], **add: Any
) -> dict[bytes, list[PromptLogprobs]]:
    """Adds the requests and steps to the end. Log probabilities come before the first token."""
    for request in requests:
        engine.add(request, **add)
    found: dict[bytes, list[PromptLogprobs]] = {request.id: [] for request in requests}
    answered = set()
    while engine.loop.has_work:
        result = engine.loop.step()
        for piece in result.prompt_logprobs:
            assert piece.id not in answered
            found[piece.id].append(piece)
        answered |= {output.id for output in result.outputs}
    assert answered == found.keys()
    return found


def check(pieces: Sequence[PromptLogprobs], prompt: list[int], top: int, expected: torch.Tensor) -> None:
    position = 1
    for piece in pieces:
        assert piece.position == position
        logprobs, top_logprobs = (np.frombuffer(x, np.float32) for x in (piece.logprobs, piece.top_logprobs))
        ranks, top_ids = (np.frombuffer(x, np.int32) for x in (piece.ranks, piece.top_ids))
        assert 1 <= len(logprobs) <= 6
        rows = expected[position - 1 :][: len(logprobs)]
        chosen = rows.gather(1, torch.tensor(prompt[position:][: len(logprobs)])[:, None])
        best = rows.topk(top)
        assert logprobs == pytest.approx(chosen[:, 0].numpy(), abs=2e-4)
        # Either of two tokens may come first whose values differ by rounding alone.
        least, most = (rows > chosen + 2e-4).sum(-1) + 1, (rows >= chosen - 2e-4).sum(-1)
        assert ((least.numpy() <= ranks) & (ranks <= most.numpy())).all()
        ids = torch.tensor(top_ids.reshape(len(logprobs), top), dtype=torch.int64)
        assert all(len({*row}) == top for row in ids.tolist())
        assert top_logprobs == pytest.approx(rows.gather(1, ids).flatten().numpy(), abs=2e-4)
        assert top_logprobs == pytest.approx(best.values.flatten().numpy(), abs=2e-4)
        position += len(logprobs)
    assert position == len(prompt)


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", [1, 2])
def test_prompts_in_chunks_and_in_a_batch(size: int, tiny_path: Path, ranks: Any, reference: Any) -> None:
    """Of one rank and of several. A cached prefix is computed again, and serves others as before."""
    engine = ranks(tiny_path, size, **CONFIG)
    plain = request_of(9, LONG, max_tokens=3)
    expected = run(engine, [plain])[plain.id].tokens
    asked = [(LONG, 3), (SHORT, 0), (OTHER, 20), (LONG[:1], 2)]
    requests = [request_of(i, prompt, prompt_logprobs=top) for i, (prompt, top) in enumerate(asked)]
    found = scores(engine, [request_of(8, OTHER, max_tokens=9), *requests])
    for request, (prompt, top) in zip(requests, asked, strict=True):
        check(found[request.id], prompt, top, reference(prompt))
    assert not found[(8).to_bytes(16)]
    hits = engine.stats().prefix_cache_hits
    assert run(engine, [plain])[plain.id].tokens == expected
    assert engine.stats().prefix_cache_hits == hits + 48
    engine.assert_whole()


def test_steps_that_overlap_and_a_handover(late_engine: Any, reference: Any) -> None:
    engine = late_engine(**CONFIG)
    request = request_of(1, LONG, max_tokens=4, prompt_logprobs=2)
    check(scores(engine, [request], handover=True)[request.id], LONG, 2, reference(LONG))
    end(engine, request.id)
    engine.assert_whole()


@pytest.mark.all
def test_a_preempted_request_gives_each_position_once(tiny_engine: Any, reference: Any) -> None:
    """The first of these requests grows until the second one must be computed again: in the middle of its
    prompt, and while it decodes."""
    for given in (OTHER, OTHER[:9]):
        engine = tiny_engine(
            max_num_batched_tokens=2, max_num_seqs=2, num_blocks=11, enable_prefix_caching=True
        )
        requests = [
            request_of(1, LONG[:14], max_tokens=30, ignore_eos=True, priority=-1),
            request_of(2, given, max_tokens=12, ignore_eos=True, prompt_logprobs=1),
        ]
        check(scores(engine, requests)[requests[1].id], given, 1, reference(given))
        assert engine.stats().preemptions == 1
        engine.assert_whole()
