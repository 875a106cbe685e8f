"""Kinds of cache that only tests know (`tests.ledger`) go wherever the cache of a request goes.

The tokens of each way are those of an engine that computes one request after another and shares nothing.
Workers with these kinds are in `tests/worker`, transports and stores in `tests/kv_transfer`.
"""

import os
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import Engine, EngineConfig, EngineRequest, SamplingParams, SpeculativeConfig
from baton.engine.core import state_copies
from baton.engine.core.offload_tier import OffloadTier
from baton.engine.execution import memory_sizing
from baton.worker.engine_process.offload import offload_pumps
from baton.worker.engine_process.paged_kv import kv_layout
from tests import ledger
from tests.engine.checkpoints import load
from tests.engine.conftest import MakeEngine, request_of, save_tiny, tokens_of
from tests.engine.test_tiers import TURNS, answers
from tests.engine.test_unequal_groups import ON_CPU, Pair, Side
from tests.ledger import model_of, register

register()
pytestmark = ON_CPU
CONFIG = EngineConfig("tiny")
SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ledger")
    save_tiny(directory, "Llama", num_attention_heads=4, num_key_value_heads=2)
    return model_of(directory)


@pytest.fixture
def copies_every_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.engine.COPY_TOKENS", 8)
    monkeypatch.setattr(state_copies, "END_TOKENS", 4)
    monkeypatch.setattr(state_copies, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(memory_sizing, "_num_copies", lambda *_: 4)


def planes(engine: Engine) -> dict[str, list[Any]]:
    """The tensors of each array, by its name."""
    found: dict[str, list[Any]] = {}
    for arrays, spec, cache in zip(engine.cache_arrays, engine.cache_spec, engine.caches, strict=True):
        for array, tensors in zip(arrays, spec.planes(cache), strict=True):
            found.setdefault(array.name, []).extend(tensors)
    return found


@pytest.mark.parametrize("lost", ["mark", "stamp", "ledger"])
def test_a_lost_array_changes_the_tokens(path: Path, lost: str) -> None:
    """Else the other tests here would prove nothing."""
    request = request_of(0, [*range(5, 40)], max_tokens=8, ignore_eos=True)
    engine = load(path, num_blocks=32, block_size=4)
    [expected] = tokens_of(engine, [request])
    engine.add(request)
    found = [engine.loop.step().outputs[0].token]
    for tensor in planes(engine)[lost]:
        tensor.zero_()
    while engine.loop.has_work:
        found += [output.token for output in engine.loop.step().outputs]
    assert found[0] == expected[0]
    assert found[1:] != expected[1:]


@pytest.mark.all
@pytest.mark.usefixtures("copies_every_8")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_evicted_and_found_again(
    path: Path, tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tier: str
) -> None:
    monkeypatch.setattr(OffloadTier, "pays", lambda *_: True)
    expected = answers(tiny_engine(model=str(path), num_blocks=200), TURNS[:12])
    sizes: dict[str, Any] = {f"{tier}_cache_size": 1 << 25, "disk_cache_dir": str(tmp_path)}
    caching = {"enable_prefix_caching": True, "num_blocks": 40, "max_num_seqs": 3}
    engine = tiny_engine(model=str(path), **caching, **sizes)
    assert answers(engine, TURNS[:12], tmp_path) == expected
    [stats] = engine.stats().offload
    assert stats.loaded_tokens
    assert all(of.stats.saved for of in engine.offload)


def test_a_prefix_is_brought_for_another_worker(
    path: Path, tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has its blocks and the states at its end. The device has evicted both."""
    monkeypatch.setattr("baton.engine.engine.COPY_TOKENS", 64)
    monkeypatch.setattr(memory_sizing, "_num_copies", lambda *_: 2)
    caching: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 64, "num_blocks": 9}
    engine = tiny_engine(model=str(path), max_num_seqs=1, host_cache_size=1 << 25, **caching)
    prompt, [pump_blocks, pump_states] = [3 + i % 190 for i in range(150)], offload_pumps(engine, CONFIG)
    exchange, other = engine.prefix_exchange, tiny_engine(model=str(path), **caching).prefix_exchange
    assert exchange is not None
    assert other is not None
    missing = other.missing(request_of(0, prompt), 99)
    assert missing is not None

    def pump() -> None:
        for each in (pump_blocks, pump_states) * 20:
            each.pump()

    tokens_of(engine, [request_of(0, prompt, max_tokens=1)])
    assert exchange.cache.copies is not None
    lease = exchange.cache.copies.lend(missing.chunks[1])
    assert lease is not None
    [ledgers] = planes(engine)["ledger"]
    kept = ledgers[:, lease.slot].clone()
    lease.end()
    pump()
    for i in range(1, 6):
        engine.add(request_of(i, [i, *prompt], max_tokens=2, ignore_eos=True))
        while engine.loop.has_work:
            engine.loop.step()
            pump()
    assert exchange.pin_prefix(missing.chunks, 0) is None
    brought: list[Any] = []
    assert exchange.bring(missing.chunks, 0, lambda: brought.append(exchange.pin_prefix(missing.chunks, 0)))
    pump()
    [pin] = brought
    assert pin is not None
    assert pin.num_chunks == len(missing.chunks) == 2
    assert torch.equal(ledgers[:, pin.held.copy.slot], kept)
    assert not exchange.bring(missing.chunks, 0, brought.clear)
    pin.end()
    for each in (pump_blocks, pump_states):
        each.close()
    engine.assert_whole()


@pytest.mark.all
@pytest.mark.usefixtures("copies_every_8")
def test_preempted_in_a_small_pool(path: Path, tiny_engine: MakeEngine) -> None:
    requests = [request_of(i, [*range(5 + i, 12 + 3 * i)], max_tokens=20, ignore_eos=True) for i in range(6)]
    plain = tiny_engine(model=str(path))
    expected = [tokens_of(plain, [request])[0] for request in requests]
    engine = tiny_engine(model=str(path), num_blocks=24, max_num_seqs=6, enable_prefix_caching=True)
    assert tokens_of(engine, requests) == expected
    assert engine.stats().preemptions
    assert tokens_of(engine, requests[:1]) == expected[:1]
    engine.assert_whole()


def test_what_has_no_name_is_not_shared(
    path: Path, tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LEDGER", replace(ledger.LEDGER, by_name=False))
    engine = tiny_engine(model=str(path), enable_prefix_caching=True)
    assert engine.prefix_exchange is None
    request = request_of(0, [*range(5, 30)], max_tokens=2)
    assert tokens_of(engine, [request]) == tokens_of(engine, [request])
    assert not engine.stats().prefix_cache_queries


@pytest.mark.all
def test_drafts_are_taken_back(path: Path, tiny_engine: MakeEngine) -> None:
    requests = [request_of(i, [7, 8, 9] * 8 + [i], max_tokens=24, ignore_eos=True) for i in range(3)]
    expected = [tokens_of(tiny_engine(model=str(path)), [request])[0] for request in requests]
    engine = tiny_engine(model=str(path), speculative_config=SpeculativeConfig("ngram", 3))
    assert tokens_of(engine, requests) == expected


@pytest.mark.cases(1)
@pytest.mark.usefixtures("copies_every_8")
@pytest.mark.parametrize("drafts", [None, SpeculativeConfig("ngram", 3)], ids=["", "drafts"])
def test_a_copy_has_the_ledger_of_its_position(
    path: Path, late_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, drafts: SpeculativeConfig | None
) -> None:
    """Whatever ends an answer: its limit, a token that ends it while the next step computes, its client."""
    rng = random.Random(6)
    monkeypatch.setattr(memory_sizing, "_num_copies", lambda *_: 40)
    config: dict[str, Any] = {"num_blocks": 48, "max_num_seqs": 4, "speculative_config": drafts}
    engine = late_engine(model=str(path), enable_prefix_caching=True, **config)
    texts = list[list[int]]()
    for turn in range(7):
        lives = list[Any]()
        for i in range(4):
            prompt = [7, 8, 9] * rng.randrange(1, 5) if rng.random() < 0.5 or not texts else rng.choice(texts)
            sampling: dict[str, Any] = {"temperature": 0.5, "seed": rng.randrange(99)}
            stops = {"ignore_eos": True} if i % 2 else {"stop_token_ids": tuple(range(0, 200, 9))}
            asked = request_of(
                10 * turn + i, prompt[:60], max_tokens=rng.randrange(1, 24), **sampling, **stops
            )
            lives.append(engine.add(asked))
        cancelled = rng.randrange(4, 20)
        while engine.loop.has_work:
            engine.loop.step()
            if not (cancelled := cancelled - 1):
                engine.cancel(lives[turn % 4])
        texts += [[*live.token_ids[: live.num_known]] for live in lives]
    engine.assert_whole()
    cache = engine.lives.cache
    assert cache is not None
    assert cache.copies is not None
    [ledgers], heads, answers = planes(engine)["ledger"], torch.arange(4.0), 0
    for text in texts:
        names = cache.names(request_of(0, text))
        names.extend(text, len(text))
        for position in range(4, len(text) + 1, 4):
            if names.blocks[position // 4 - 1] in cache.copies:
                [slot] = cache.copies.lookup([names.blocks[position // 4 - 1]])
                value = torch.zeros(4)
                for i, token in enumerate(text[:position]):
                    value = (value * 31 + token * 7 + i + heads) % ledger.LARGEST
                assert torch.equal(ledgers[0, slot, :, 0, 0], value)
                answers += position % 8 > 0
    assert answers > 10


@pytest.mark.cases(1)
@pytest.mark.usefixtures("copies_every_8")
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 4)])
def test_handed_over_between_groups(path: Path, prefill_ranks: int, decode_ranks: int) -> None:
    """In turns of chats, which begin with cached prefixes. When a worker is lost, prompt and output go on
    elsewhere. The last case uses exported memory."""
    rng, layout = random.Random(4), kv_layout(load(path, num_blocks=8))
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 15, 16, 33, 70)]
    exports = prefill_ranks == 2 and decode_ranks == 4
    both: dict[str, Any] = {
        "num_blocks": 60, "max_num_batched_tokens": 16, "enable_prefix_caching": True, "exports": exports,
    }  # fmt: skip
    plain = load(path, num_blocks=60, block_size=16)

    def alone(prompts: list[list[int]]) -> list[list[int]]:
        return [tokens_of(plain, [of(prompt)])[0] for prompt in prompts]

    def of(prompt: list[int]) -> EngineRequest:
        return EngineRequest(os.urandom(16), prompt, [], SAMPLING)

    prefill = Side(path, layout, prefill_ranks, block_size=16, **both)
    decode = Side(path, layout, decode_ranks, block_size=32, **both)
    with closing(prefill), closing(decode):
        pair = Pair(prefill, decode)
        expected = alone(prompts)
        assert pair.run([of(prompt) for prompt in prompts]) == expected
        turns = [[*prompts[i], *expected[i], 9, 8, 7] for i in (3, 4)]
        assert pair.run([of(prompt) for prompt in turns]) == alone(turns)
        assert all(list(prefill.sink.cached.values())[-2:])
        assert all(pair.cached[-2:])
        resumed = [of([*prompt, *tokens[:3]]) for prompt, tokens in zip(prompts, expected, strict=True)]
        assert [tokens[:3] for tokens in pair.run(resumed)] == [tokens[3:] for tokens in expected]
