"""The engine with a tiny random model: every way a request can live and end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from baton.engine import Engine, EngineRequest, Logprobs, check_request
from baton.engine.core.live_request import LiveRequest
from baton.engine.kernels import parts
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine, request_of, run
from tests.engine.scheduling import end, hooks_to, live_of

PROMPT = [5, 9, 17, 33, 65, 129, 3, 4, 11]
POISON = 198


@pytest.fixture
def expected(tiny_engine: MakeEngine) -> Callable[..., list[int]]:
    """The tokens of one request in an engine of its own with a large pool."""

    def tokens(prompt: Sequence[int], **sampling: Any) -> list[int]:
        request = request_of(1, prompt, **{"ignore_eos": True, **sampling})
        return run(tiny_engine(), [request])[request.id].tokens

    return tokens


# Ends


def test_stop_conditions(tiny_engine: MakeEngine, expected: Any) -> None:
    full = expected(PROMPT, max_tokens=30)
    third = full[2]
    assert third not in full[:2]
    engine = tiny_engine(max_model_len=20)
    engine._outputs._eos_ids = (third,)
    cases = {
        "eos": (request_of(1, PROMPT, max_tokens=30), full[:3], "stop"),
        "eos ignored": (request_of(2, PROMPT, max_tokens=5, ignore_eos=True), full[:5], "length"),
        "stop token": (
            request_of(3, PROMPT, max_tokens=30, ignore_eos=True, stop_token_ids=(full[1],)),
            full[:2],
            "stop",
        ),
        "max_tokens": (request_of(4, PROMPT, max_tokens=1), full[:1], "length"),
        "max_model_len": (request_of(5, PROMPT, max_tokens=30, ignore_eos=True), full[:11], "length"),
        "stop on the last": (request_of(6, PROMPT, max_tokens=3), full[:3], "stop"),
    }
    results = run(engine, [request for request, _, _ in cases.values()])
    for name, (request, tokens, reason) in cases.items():
        result = results[request.id]
        assert (result.tokens, result.finish_reason) == (tokens, reason), name
        assert [output.output_index for output in result.outputs] == list(range(len(tokens)))
        assert not any(output.finish_reason for output in result.outputs[:-1])
    engine.assert_whole()


def test_no_stop_below_min_tokens(tiny_engine: MakeEngine, expected: Any) -> None:
    full = expected(PROMPT, max_tokens=30)
    request = request_of(1, PROMPT, max_tokens=30, min_tokens=6, ignore_eos=True, stop_token_ids=(full[2],))
    tokens = run(tiny_engine(), [request])[request.id].tokens
    assert full[2] not in tokens[:6]


def test_given_output_counts_as_generated(tiny_engine: MakeEngine, expected: Any) -> None:
    for sampling in (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.8, "seed": 5, "frequency_penalty": 1.0, "min_tokens": 9, "repetition_penalty": 1.3},
    ):
        full = expected(PROMPT, max_tokens=12, **sampling)
        request = request_of(1, PROMPT, full[:7], max_tokens=12, ignore_eos=True, **sampling)
        result = run(tiny_engine(), [request])[request.id]
        assert result.tokens == full[7:]
        assert [output.output_index for output in result.outputs] == list(range(7, 12))
        assert result.finish_reason == "length"


# What the caller may not do


@pytest.mark.parametrize(
    ("prompt", "output", "sampling", "message"),
    [
        ([], [], {}, "prompt_ids is empty"),
        ([7, 199], [], {}, "prompt_ids has token 199, which is not in the vocabulary of 199"),
        ([1], [-1], {}, "output_ids has token -1, which"),
        ([1], [], {"stop_token_ids": (199,)}, "stop_token_ids has token 199, which"),
        ([1], [], {"logit_bias": {400: 1.0}}, "logit_bias has token 400, which"),
        ([1], [1, 1], {"max_tokens": 2}, "max_tokens is 2, but output_ids has 2 already"),
        ([1] * 200, [1] * 56, {"max_tokens": 99}, r"have 256 tokens; .* limit is 256 \(max_model_len\)"),
    ],
)
def test_requests_that_can_never_be_served(prompt: Any, output: Any, sampling: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_of(1, prompt, output, **sampling), 199, 256)


def test_a_request_may_fill_the_context() -> None:
    check_request(request_of(1, [0] * 200, [198] * 55, max_tokens=56), 199, 256)


# Crowds


def crowd(**sampling: Any) -> list[EngineRequest]:
    """Requests with prompts of many lengths and every kind of sampling."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    ]
    return [
        request_of(
            i,
            [(7 * i + 13 * j) % 190 + 3 for j in range(1 + 5 * i)],
            max_tokens=6 + 5 * (i % 4),
            ignore_eos=True,
            seed=i,
            **kinds[i % 4],
            **sampling,
        )
        for i in range(9)
    ]


def without_repeats() -> list[EngineRequest]:
    """Their penalties count a token that the host does not know yet, if steps overlap."""
    return [
        request_of(100 + n, PROMPT[:n], max_tokens=30, ignore_eos=True, repetition_penalty=1e6)
        for n in (2, 3, 4)
    ]


@pytest.fixture(scope="module")
def alone(tiny_engine: MakeEngine) -> dict[bytes, list[int]]:
    """The tokens of each request, from an engine that serves nothing else."""
    return {
        request.id: run(tiny_engine(), [request])[request.id].tokens
        for request in (*crowd(), *without_repeats())
    }


PREEMPTING: dict[str, Any] = {"num_blocks": 20, "max_num_batched_tokens": 16, "max_num_seqs": 9}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("config", "overlap"),
    [
        pytest.param(config, overlap, id=f"{name}{', overlap' * overlap}")
        for name, config, modes in (
            ("roomy", {"num_blocks": 99}, (False, True)),
            ("small chunks", {"max_num_batched_tokens": 8, "max_num_seqs": 8}, (True,)),
            ("one by one", {"max_num_batched_tokens": 1, "max_num_seqs": 1}, (True,)),
            ("preemption", PREEMPTING, (False, True)),
            ("preemption, prefix cache", {**PREEMPTING, "enable_prefix_caching": True}, (False, True)),
            (
                "prefix cache",
                {"enable_prefix_caching": True, "block_size": 2, "num_blocks": 256},
                (False, True),
            ),
            ("large blocks", {"block_size": 128, "num_blocks": 12}, (False,)),
            ("blocks of one", {"block_size": 1, "num_blocks": 400}, (True,)),
        )
        for overlap in modes
    ],
)
def test_a_request_in_a_batch_gets_the_same_tokens_as_alone(
    tiny_engine: MakeEngine, late_engine: MakeEngine, alone: dict[bytes, Any], config: Any, overlap: bool
) -> None:
    requests = [*crowd(), *without_repeats()]
    engine = late_engine(**config) if overlap else tiny_engine(**config)
    for _ in range(2 if "enable_prefix_caching" in config else 1):  # then: hits all the way
        results = run(engine, requests)
        assert {key: result.tokens for key, result in results.items()} == alone
        engine.assert_whole()
    assert (engine.stats().preemptions > 0) == (config.get("num_blocks") == 20)


def test_prefix_cache_saves_work_and_reports_it(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(enable_prefix_caching=True)
    first, second = request_of(1, PROMPT, max_tokens=4), request_of(2, [*PROMPT, 8], max_tokens=4)
    assert run(engine, [first])[first.id].outputs[0].cached_tokens == 0
    assert run(engine, [second])[second.id].outputs[0].cached_tokens == 8
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (19, 8)
    assert stats.blocks_free == stats.blocks_total
    engine.assert_whole()


def test_prefixes_are_not_shared_between_salts(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(enable_prefix_caching=True)
    found = []
    for i, salt in enumerate([b"", b"a", b"b", b"a", b""]):
        request = request_of(i, [*PROMPT, 8], max_tokens=4)
        request.cache_salt = salt
        found.append(run(engine, [request])[request.id].outputs[0].cached_tokens)
    assert found == [0, 0, 0, 8, 8]
    engine.assert_whole()


def poison(engine: Engine) -> None:
    """The embedding of the token `POISON` becomes NaN."""
    embedding = engine.runner.model.embedding
    if DEVICE == "cpu":  # a CPU maps the file, which must not change; graphs of a GPU need the same address
        embedding.weight = embedding.weight.clone()
    embedding.weight[POISON] = torch.nan


@pytest.mark.parametrize("overlap", [False, True])
def test_a_nan_fails_one_request_only(
    tiny_engine: MakeEngine, late_engine: MakeEngine, overlap: bool
) -> None:
    """Also if the next step is launched already."""
    requests = crowd(logit_bias={POISON: -1e6})
    engine = (late_engine if overlap else tiny_engine)(enable_prefix_caching=True)
    poison(engine)
    victims = [request_of(100 + i, [*PROMPT[: 1 + 2 * i], POISON, 7], max_tokens=9) for i in range(4)]
    mixed = [request for pair in zip(requests, victims, strict=False) for request in pair] + requests[4:]
    results = run(engine, mixed)
    engine.assert_whole()
    expected = run(tiny_engine(num_blocks=256), requests)
    for victim in victims:
        assert results[victim.id].failed == "the model's logits are not finite numbers"
        assert not results[victim.id].outputs
    for request in requests:
        assert results[request.id].failed is None
        assert results[request.id].tokens == expected[request.id].tokens
    clean = run(engine, [request_of(7, [*PROMPT, 8, 7], max_tokens=9, logit_bias={POISON: -1e6})])
    # It was on blocks that held NaN.
    assert all(result.failed is None for result in clean.values())


def test_only_the_request_that_bars_every_token_is_refused(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine()
    other = request_of(1, PROMPT, max_tokens=4, ignore_eos=True)
    barred = request_of(2, PROMPT, max_tokens=4, min_tokens=2, stop_token_ids=tuple(range(199)))
    results = run(engine, [barred, other])
    assert results[barred.id].refused == "its sampling parameters leave no token to choose from"
    assert not results[barred.id].outputs
    assert results[other.id].tokens == run(tiny_engine(), [other])[other.id].tokens
    engine.assert_whole()


@pytest.mark.parametrize("at", [0, 5, 12, 22, 23], ids="token {}".format)
@pytest.mark.parametrize("handover", [False, True])
def test_a_prompt_with_a_nan_is_never_shared(tiny_engine: MakeEngine, at: int, handover: bool) -> None:
    """Chunks have 8 tokens, blocks 4. Blocks before the NaN were computed, but they are not shared either."""
    engine = tiny_engine(enable_prefix_caching=True, max_num_batched_tokens=8, max_num_seqs=4)
    poison(engine)
    prompt = [*range(3, 27)]
    prompt[at] = POISON
    for number in (1, 2):
        victim = request_of(number, prompt, max_tokens=9)
        result = run(engine, [victim], handover=handover)[victim.id]
        assert result.failed == "the model's logits are not finite numbers"
        assert not result.outputs
        assert engine.stats().blocks_cached == 0
        assert engine.stats().prefix_cache_hits == 0
        end(engine, victim.id)
        engine.assert_whole()


# Handover


class Recorder:
    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.events: list[tuple[Any, ...]] = []
        self.ticks = 0

    def prefill_started(self, live: LiveRequest) -> None:
        self.events.append(("started", live.owner, list(live.blocks), len(live.token_ids), live.num_cached))

    def layer_done(self, layer: int, chunks: Mapping[bytes, range]) -> None:
        assert self.engine is not None
        for request_id, chunk in chunks.items():
            blocks = next(e[2] for e in self.events if e[:2] == ("started", request_id))
            kv = read(self.engine, blocks, chunk.stop)[layer]
            self.events.append(("layer", layer, request_id, chunk, kv[:, chunk.start :]))

    def tick(self) -> None:
        self.ticks += 1


def slots(blocks: Sequence[int], block_size: int, count: int) -> torch.Tensor:
    return torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(count)])


def read(engine: Engine, blocks: Sequence[int], count: int) -> list[torch.Tensor]:
    """K and V of positions [0, count): one [2, count, heads, head_dim] per layer."""
    index = slots(blocks, engine.block_size, count)
    return [parts(cache)[0].flatten(1, 2)[:, index].clone() for cache in engine.caches]


def _noted(function: Callable[..., Any], order: list[str]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        order.append(function.__name__)
        return function(*args)

    return noted


def test_the_sink_sees_each_layer_of_each_chunk_when_it_is_written(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Recorder()
    engine = sink.engine = tiny_engine(hooks=hooks_to(sink), max_num_batched_tokens=5, max_num_seqs=5)
    sink.ticks = 0
    order: list[str] = []
    for owner, name in ((engine.runner._kernels, "attention"), (sink, "layer_done")):
        monkeypatch.setattr(owner, name, _noted(getattr(owner, name), order))
    request = request_of(1, PROMPT, max_tokens=4, ignore_eos=True)
    plain = request_of(2, PROMPT, max_tokens=2)
    engine.add(request, handover=True)
    engine.add(plain)
    results = run(engine)
    assert sink.ticks % (engine.model_config.num_layers + 1) == 0  # each layer, and the end of the step
    assert sink.ticks > 0
    assert order[:6] == ["layer_done", "attention"] * 3, "told after what could have hidden the transfer"
    started, *layers = sink.events
    assert started[:2] == ("started", request.id)
    assert started[3:] == (9, 0)
    assert [event[1:4] for event in layers] == [
        (layer, request.id, chunk) for chunk in (range(5), range(5, 9)) for layer in range(3)
    ]
    final = read(engine, started[2], 9)
    for _, layer, _, chunk, kv in layers:
        assert torch.equal(kv, final[layer][:, chunk.start : chunk.stop]), "reported before it was written"
    assert len(results[request.id].outputs) == 1
    assert engine.stats().held_prefills == 1
    assert not engine.idle
    assert not engine.loop.has_work
    end(engine, request.id)
    end(engine, request.id)
    assert engine.idle
    engine.assert_whole()


def test_a_handover_that_ends_with_its_first_token_keeps_its_blocks_until_release(
    tiny_engine: MakeEngine, expected: Any
) -> None:
    first = expected(PROMPT, max_tokens=1)[0]
    engine = tiny_engine()
    for i, (sampling, reason) in enumerate(
        [({"max_tokens": 1}, "length"), ({"max_tokens": 9, "stop_token_ids": (first,)}, "stop")]
    ):
        request = request_of(i, PROMPT, **sampling)
        (output,) = run(engine, [request], handover=True)[request.id].outputs
        assert (output.token, output.finish_reason) == (first, reason)
        assert engine.stats().held_prefills == 1, "the pump may still be reading"
        end(engine, request.id)
        engine.assert_whole()


def test_logprobs_come_from_the_logits_before_adjustments(tiny_engine: MakeEngine) -> None:
    """Penalties and other adjustments do not change the reported log probabilities."""
    engine = tiny_engine()

    def first(**sampling: Any) -> tuple[int, Logprobs]:
        request = request_of(1, PROMPT, max_tokens=1, **sampling)
        (output,) = run(engine, [request])[request.id].outputs
        assert output.logprobs is not None
        return output.token, output.logprobs

    _, own = first(logprobs=4)
    third = own.top_ids[2]
    token, found = first(logprobs=4, logit_bias={third: 100.0}, presence_penalty=1.0)
    assert token == third
    assert found.logprob == pytest.approx(own.top_logprobs[2])
    assert found.top_ids == own.top_ids
    assert found.top_logprobs == pytest.approx(own.top_logprobs)
    _, found = first(logprobs=0, logprob_token_ids=own.top_ids[::-2])
    assert found.top_ids == own.top_ids[::-2]
    assert found.top_logprobs == pytest.approx(own.top_logprobs[::-2])


def test_cached_prefix_is_announced_as_ready(tiny_engine: MakeEngine) -> None:
    sink = Recorder()
    engine = sink.engine = tiny_engine(hooks=hooks_to(sink), enable_prefix_caching=True)
    for number in (1, 2):
        run(engine, [request_of(number, PROMPT)], handover=True)
        end(engine, request_of(number, PROMPT).id)
    assert [event[3:] for event in sink.events if event[0] == "started"] == [(9, 0), (9, 8)]
    engine.assert_whole()


def test_cancel_in_every_phase(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(max_num_batched_tokens=8, max_num_seqs=4)
    waiting, chunked, decoding, held, reserved, joined = (
        request_of(i, [*PROMPT, i], ignore_eos=True) for i in range(6)
    )
    engine.add(held, handover=True)
    engine.loop.step()
    engine.loop.step()
    engine.add(decoding)
    engine.loop.step()
    engine.loop.step()
    assert engine.reserve(reserved) is not None
    reservation = engine.reserve(joined)
    assert reservation is not None
    for cache in engine.caches:
        parts(cache)[0][:, list(reservation.blocks)] = 0.5  # in place of the KV that a prefill would send
    engine.join(live_of(engine, joined.id), 3)
    engine.add(chunked)
    engine.loop.step()  # only decodes
    engine.loop.step()
    engine.add(waiting)
    stats = engine.stats()
    assert (stats.requests_running, stats.requests_waiting) == (3, 1)
    assert (stats.held_prefills, stats.reservations) == (1, 1)
    assert stats.tokens_waiting == 10 + (10 - 6)
    for request in (waiting, chunked, decoding, held, reserved, joined):
        end(engine, request.id)
        end(engine, request.id)
    assert engine.idle
    assert not engine.loop.has_work
    engine.assert_whole()
    assert engine.loop.step().outputs == []


@pytest.mark.all
def test_a_started_request_gets_the_same_tokens_and_changes_no_others(
    tiny_engine: MakeEngine, expected: Any
) -> None:
    engine = tiny_engine(max_num_batched_tokens=64, itl_target=60.0)
    long = [*PROMPT * 6]
    right = {
        number: expected(prompt, max_tokens=12, **sampling)
        for number, prompt, sampling in (
            (1, PROMPT, {}),
            (2, long, {}),
            (3, long, {"temperature": 0.8, "seed": 3}),
        )
    }
    got: dict[int, list[int]] = {1: [], 2: [], 3: []}
    engine.add(request_of(1, PROMPT, max_tokens=12, ignore_eos=True))
    for step in range(200):
        if step == 4:
            assert engine.start(request_of(2, long, max_tokens=12, ignore_eos=True))
            sampled = request_of(
                3, long, right[3][:5], max_tokens=12, ignore_eos=True, temperature=0.8, seed=3
            )
            assert engine.start(sampled)
        for output in engine.loop.step().outputs:
            got[int.from_bytes(output.id)].append(output.token)
    assert got == {1: right[1], 2: right[2], 3: right[3][5:]}
    assert engine.stats().long.tokens > 0, "a long step has room beside decodes"
    engine.assert_whole()


def test_a_request_in_steps_of_its_own_gets_the_same_tokens(tiny_engine: MakeEngine, expected: Any) -> None:
    engine = tiny_engine(max_num_batched_tokens=64, max_num_seqs=4)
    requests = [request_of(n, [n, *PROMPT], max_tokens=8, ignore_eos=True) for n in (1, 2, 3)]
    requests[1].alone = True
    for request in requests:
        engine.add(request)
    got: dict[bytes, list[int]] = {request.id: [] for request in requests}
    together = set()
    while engine.loop.has_work:
        outputs = engine.loop.step().outputs
        together.add(len(outputs))
        assert len(outputs) == 1 or got[requests[1].id] or requests[1].id not in {o.id for o in outputs}
        for output in outputs:
            got[output.id].append(output.token)
    assert 3 in together, "once it has a token, it shares steps"
    for n, request in enumerate(requests, 1):
        assert got[request.id] == expected([n, *PROMPT], max_tokens=8)
    engine.assert_whole()
