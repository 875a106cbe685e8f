"""Models with state layers: where prompts are cut, what preempts them, and which steps run ahead.

Their tokens are compared with transformers in `test_models`.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import Engine, EngineConfig, EngineRequest, step_loop
from baton.engine.core import state_copies
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.offload_tier import Load, OffloadTier
from baton.engine.core.prefix_names import PrefixNames
from baton.engine.core.request_loads import RequestLoads
from baton.engine.core.state_copies import StateCopies, Wanted
from baton.engine.core.step_builder import Schedule
from baton.engine.execution import memory_sizing
from baton.engine.execution.warmup import Rehearsal, warm_up
from baton.engine.kernels import LayerState
from baton.engine.loader import check_model
from baton.engine.loader.hf_config import read_config
from tests.device import DEVICE
from tests.engine.checkpoints import assert_refused, edited_copy
from tests.engine.conftest import MakeEngine, TinyOf, request_of, run, save_tiny, tokens_of
from tests.engine.scheduling import add, live_of, make, of_slots
from tests.engine.test_overlap import land_one
from tests.engine.test_tiers import TURNS, answers, corrupt


def kinds_of_models(*quick: str) -> list[Any]:
    """All of them. Those that are not `quick` are of long tests."""
    kinds = "Bamba", "KimiLinear", "OlmoHybrid", "Qwen3Next", "Qwen3_5Text", "Lfm2", "Lfm3"
    narrow = "Bamba narrow", "KimiLinear narrow"
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.long) for kind in kinds + narrow]


KINDS = kinds_of_models("Bamba", "KimiLinear", "OlmoHybrid")
"""Modules of transformers compute OlmoHybrid and Lfm3. Narrow: states are in bfloat16. The exact mode rounds
them after each token, so no cut of a prompt decides when they are rounded."""
of_layers = pytest.mark.parametrize("path", kinds_of_models("Bamba", "KimiLinear"), indirect=True)
"""Of tests whose faults are in the scheduler and the caches. Modules take four times as long, and get their
states from the same ones: other tests here and `test_modules` show what modules do with states."""
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(3, 199) for _ in range(n)] for n in (1, 2, 3, 5, 21, 70)]


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tiny_of: TinyOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, *narrow = request.param.split(" ")
    found = tiny_of(kind)
    if not narrow:
        return found
    if DEVICE == "cuda":
        pytest.skip("exact kernels of a GPU are for 16 bits; all else is float32 here")
    return edited_copy(found, tmp_path_factory.mktemp(NARROW), mamba_ssm_dtype="bfloat16")


NARROW = "narrow"


@pytest.fixture(scope="module")
def tiny_engine(tiny_engine: MakeEngine) -> MakeEngine:
    def make(**config: Any) -> Any:
        return tiny_engine(**{"batch_invariant": NARROW in config.get("model", ""), **config})

    return make


@pytest.mark.all
def test_a_prompt_may_be_cut_anywhere(path: Path, tiny_engine: MakeEngine) -> None:
    request = request_of(0, PROMPTS[4], max_tokens=4, ignore_eos=True)
    expected = tokens_of(tiny_engine(model=str(path)), [request])
    for budget in (1, 3, 4, 20):
        engine = tiny_engine(model=str(path), max_num_batched_tokens=budget, max_num_seqs=1)
        assert tokens_of(engine, [request]) == expected


@pytest.fixture(scope="module")
def requests() -> list[Any]:
    return [
        request_of(i, prompt, max_tokens=7 + i, ignore_eos=i % 2 > 0) for i, prompt in enumerate(PROMPTS * 2)
    ]


@pytest.fixture(scope="module")
def alone(path: Path, tiny_engine: MakeEngine, requests: list[Any]) -> list[list[int]]:
    """The tokens of each of `requests`, computed one after another. The second half begins as the first."""
    engine, count = tiny_engine(model=str(path)), len(PROMPTS)
    longer = [tokens_of(engine, [request])[0] for request in requests[count:]]
    shorter = zip(longer, requests, strict=False)
    return [*(tokens[: request.sampling.max_tokens] for tokens, request in shorter), *longer]


@of_layers
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("config", "overlap"),
    [
        pytest.param({"num_blocks": 128}, True, id="roomy"),
        pytest.param(
            {"max_num_batched_tokens": 8, "max_num_seqs": 3, "num_blocks": 128}, True, id="small chunks"
        ),
        *(
            pytest.param(
                {"num_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 10},
                overlap,
                id=f"preemption-{overlap}",
            )
            for overlap in (False, True)
        ),
    ],
)
def test_tokens_do_not_depend_on_other_requests(
    path: Path,
    tiny_engine: MakeEngine,
    late_engine: MakeEngine,
    requests: list[Any],
    alone: list[list[int]],
    config: dict[str, Any],
    overlap: bool,
) -> None:
    """Also with steps that run ahead of the ends of requests, which leave their slots to later ones."""
    engine = (late_engine if overlap else tiny_engine)(model=str(path), **config)
    assert tokens_of(engine, requests) == alone
    assert (engine.stats().preemptions > 0) == (engine.num_blocks == 24)
    engine.assert_whole()


@pytest.mark.gpu
def test_graphs_change_no_tokens(path: Path, tiny_engine: MakeEngine) -> None:
    """Graphs of decodes, of chunks, and of both are padded with rows and chunks that have no state."""
    requests = [
        request_of(i, prompt, max_tokens=20 + i, ignore_eos=True) for i, prompt in enumerate(PROMPTS * 3)
    ]
    settings = {"model": str(path), "num_blocks": 256, "max_num_batched_tokens": 64, "max_num_seqs": 12}
    expected = tokens_of(tiny_engine(**settings), requests)
    for overlap in (False, True):
        engine = tiny_engine(**settings, cuda_graphs=True, overlap=overlap)
        for _ in range(2):
            assert tokens_of(engine, requests) == expected


@pytest.mark.all
def test_no_step_changes_the_states_of_a_held_request(path: Path, late_engine: MakeEngine) -> None:
    """They stay those after the prompt, while steps run ahead and other requests come and go."""
    engine = late_engine(model=str(path))
    held = request_of(0, PROMPTS[4], max_tokens=5, ignore_eos=True)
    engine.add(held, handover=True)
    engine.add(request_of(1, PROMPTS[3], max_tokens=30, ignore_eos=True))
    while not land_one(engine).outputs:
        pass

    def states() -> list[torch.Tensor]:
        slot = live_of(engine, held.id).state_slot
        return [x[slot].clone() for x in of_slots(engine)]

    before = states()
    run(engine, [request_of(2, PROMPTS[5], max_tokens=3)])
    assert all(map(torch.equal, states(), before))
    first = engine.resume(live_of(engine, held.id), b"resumed")
    assert first is not None
    rest = run(engine)[b"resumed"].tokens
    (expected,) = tokens_of(engine, [request_of(3, PROMPTS[4], max_tokens=5, ignore_eos=True)])
    assert [first.token, *rest] == expected
    engine.assert_whole()


def test_a_rehearsal_with_fewer_states_than_requests(path: Path, tiny_engine: MakeEngine) -> None:
    """As before the pools are made, when the layers of a kind share memory."""
    limits = EngineConfig(str(path), max_num_seqs=4, max_num_batched_tokens=16)
    rehearsal = Rehearsal(limits, 32, 4, num_slots=3)
    runner = tiny_engine(model=str(path), max_num_seqs=4).runner
    runner.cache.open(rehearsal.num_blocks, 3, shared=True)
    layers = runner.cache.of_layers
    states = [cache[-1].data_ptr() for cache in layers if isinstance(cache, LayerState | list)]
    assert len(set(states)) == 1 < len(states)
    warm_up(runner, rehearsal, lambda *_: None)


@pytest.fixture
def caching(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Configurations with a prefix cache, with copies of states every 8 positions."""

    def make(num_copies: int, **config: Any) -> dict[str, Any]:
        monkeypatch.setattr(memory_sizing, "_num_copies", lambda *_: num_copies)
        return {"enable_prefix_caching": True, **config}

    monkeypatch.setattr("baton.engine.engine.COPY_TOKENS", 8)
    monkeypatch.setattr(state_copies, "END_TOKENS", 4)
    monkeypatch.setattr(state_copies, "ANSWER_TOKENS", 4)
    return make


def chats(engine: Engine, turns: int = 3) -> tuple[list[Any], list[int]]:
    """Several chats at the same time: each prompt has the turns before it. Returns the tokens of all turns,
    and how many tokens of each prompt came from the cache."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (2, 9, 17, 30)]
    prompts.append([*prompts[3][:25], 4, 5, 6])
    found: list[Any] = []
    cached: list[int] = []
    for turn in range(turns):
        requests = [
            request_of(10 * turn + i, prompt, max_tokens=3 + 4 * (i % 3), ignore_eos=True)
            for i, prompt in enumerate(prompts)
        ]
        results = run(engine, requests)
        for prompt, result in zip(prompts, results.values(), strict=True):
            found.append(result.tokens)
            cached.append(result.outputs[0].cached_tokens)
            prompt += [*result.tokens, *(rng.randrange(3, 199) for _ in range(5))]
        engine.assert_whole()
    return found, cached


@pytest.fixture(scope="module")
def chats_without_a_cache(path: Path, tiny_engine: MakeEngine) -> list[Any]:
    """The tokens of all turns of `chats`."""
    found, none = chats(tiny_engine(model=str(path), num_blocks=200))
    assert not any(none)
    return found


@of_layers
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("num_copies", "config", "overlap"),
    [
        pytest.param(99, {"num_blocks": 200}, False, id="roomy"),
        pytest.param(
            6, {"num_blocks": 200, "max_num_batched_tokens": 11, "max_num_seqs": 3}, True, id="few copies"
        ),
        pytest.param(99, {"num_blocks": 40, "max_num_seqs": 3}, True, id="few blocks"),
    ],
)
def test_chats_with_a_prefix_cache_get_the_same_tokens(
    path: Path,
    tiny_engine: MakeEngine,
    late_engine: MakeEngine,
    caching: Callable[..., dict[str, Any]],
    chats_without_a_cache: list[Any],
    num_copies: int,
    config: dict[str, Any],
    overlap: bool,
) -> None:
    """Also when copies or blocks are evicted, and with requests that are preempted."""
    engine = (late_engine if overlap else tiny_engine)(model=str(path), **caching(num_copies, **config))
    found, cached = chats(engine)
    assert found == chats_without_a_cache
    assert any(cached)
    assert all(count % 4 == 0 for count in cached), "whole blocks"
    cache = engine.lives.cache
    assert cache is not None
    assert cache.copies is not None
    assert (num_copies == 6) != bool(cache.copies.unused), "few slots have a copy each"


@pytest.fixture(scope="module")
def answered(path: Path, tiny_engine: MakeEngine) -> list[Any]:
    """What the first of `TURNS` are answered without a cache."""
    return answers(tiny_engine(model=str(path), num_blocks=200), TURNS[:12])


@of_layers
@pytest.mark.all
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_states_live_on_below_the_device(
    path: Path,
    tiny_engine: MakeEngine,
    caching: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answered: list[Any],
    tier: str,
    request: pytest.FixtureRequest,
) -> None:
    """Requests begin with states that the device has evicted, and give the tokens that they give alone. What
    one tier has of one kind is damaged, and so is what the other tier has of the other kinds."""
    breaks = (tier == "host") == (request.node.callspec.params["path"] == KINDS[0])
    loaded_states, load = list[bytes](), OffloadTier.load

    def noted(self: OffloadTier, name: bytes, cell: int, of: Load) -> None:
        if self.of_states:
            loaded_states.append(name)
        load(self, name, cell, of)

    monkeypatch.setattr(OffloadTier, "pays", lambda *_: True)
    monkeypatch.setattr(OffloadTier, "load", noted)
    sizes = {"num_blocks": 40, "max_num_seqs": 3, f"{tier}_cache_size": 1 << 25}
    engine = tiny_engine(model=str(path), **caching(4, **sizes), disk_cache_dir=str(tmp_path))
    assert answers(engine, TURNS[:12], tmp_path, corrupt if breaks else lambda _: None) == answered
    assert loaded_states
    blocks, states = engine.offload
    assert blocks.stats.saved
    assert states.stats.saved
    [stats] = engine.stats().offload
    assert stats.saved == blocks.stats.saved + states.stats.saved
    assert bool(stats.damaged) == breaks
    assert stats.blocks_total == blocks.num_places
    assert breaks or stats.loaded_tokens


@of_layers
@pytest.mark.cases(1)
@pytest.mark.parametrize("pays", [True, False])
def test_blocks_on_the_device_stay_while_their_states_are_loaded(
    path: Path,
    tiny_engine: MakeEngine,
    caching: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    answered: list[Any],
    pays: bool,
) -> None:
    """The device has few copies and many blocks. If a load does not pay, a request gives such blocks back."""
    given_back = list[int]()
    begin_at = RequestLoads._begin_at

    def noted(self: RequestLoads, live: LiveRequest, names: PrefixNames, begin: int) -> None:
        given_back.append(live.num_published - begin)
        begin_at(self, live, names, begin)

    monkeypatch.setattr(OffloadTier, "pays", lambda self, *_: pays)
    monkeypatch.setattr(RequestLoads, "_begin_at", noted)
    engine = tiny_engine(model=str(path), **caching(4, num_blocks=200, host_cache_size=1 << 25))
    assert answers(engine, TURNS[:12]) == answered
    [stats] = engine.stats().offload
    assert stats.loaded_tokens == 0, "no block was evicted"
    assert (engine.stats().prefix_cache_hits > 0) or not pays
    assert any(given_back) != pays


@pytest.mark.all
def test_each_rank_copies_its_states(
    path: Path,
    tiny_engine: MakeEngine,
    ranks: Callable[..., Engine],
    caching: Callable[..., dict[str, Any]],
) -> None:
    if read_config(path).modules is not None:
        pytest.skip("modules of transformers compute on one device")
    one = chats(tiny_engine(model=str(path), **caching(99), num_blocks=200), 2)
    assert chats(ranks(path, 2, **caching(99), num_blocks=200), 2) == one
    assert any(one[1])


def test_a_hit_needs_blocks_and_a_copy_at_their_end(
    path: Path, tiny_engine: MakeEngine, caching: Callable[..., dict[str, Any]]
) -> None:
    """A prompt of 30 tokens gets copies at 8, 16, 24 and 28, but keeps at most a quarter of all slots."""
    engine = tiny_engine(model=str(path), **caching(12))
    prompt = [3 + i % 190 for i in range(30)]

    def cached(tokens: list[int], number: int) -> int:
        return run(engine, [request_of(number, tokens, max_tokens=1)]).popitem()[1].outputs[0].cached_tokens

    assert cached(prompt, 0) == 0
    assert cached([*prompt, 7, 8, 9], 1) == 28
    assert cached(prompt[:29], 2) == 28
    assert cached(prompt[:28], 3) == 24, "the last token of a prompt is always computed"
    assert cached(prompt[:24], 4) == 16
    assert cached(prompt[:16], 5) == 0, "the copy at 8 made room for the last one"
    engine.assert_whole()


@of_layers
@pytest.mark.cases(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_begins_where_the_answer_ended(
    path: Path,
    tiny_engine: MakeEngine,
    late_engine: MakeEngine,
    caching: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
) -> None:
    """Of each turn, an engine computes its new tokens and what is behind the last block of the answer. Its
    last token was never an input. Four copies are enough for three turns of a chat."""
    config = caching(4, num_blocks=200)
    monkeypatch.setattr("baton.engine.engine.COPY_TOKENS", 1000)
    engine = (late_engine if overlap else tiny_engine)(model=str(path), **config)
    plain = tiny_engine(model=str(path), num_blocks=200)
    history, computed, expected = [3 + i % 190 for i in range(30)], list[int](), [30]
    for turn in range(3):
        request = request_of(turn, history, max_tokens=9 + 4 * turn, ignore_eos=True)
        [(_, result)] = run(engine, [request]).items()
        assert [result.tokens] == tokens_of(plain, [request])
        computed.append(len(history) - result.outputs[0].cached_tokens)
        history += [*result.tokens, 7, 8, 9]
        engine.assert_whole()
        expected.append(len(history) - (len(history) - 4) // 4 * 4)
    assert computed == expected[:-1]


def test_a_prefix_that_prompts_share_gets_states(
    path: Path,
    tiny_engine: MakeEngine,
    caching: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second prompt shows where they part, so the third one begins there."""
    config = caching(12, num_blocks=200)
    monkeypatch.setattr("baton.engine.engine.COPY_TOKENS", 1000)
    engine, plain = (tiny_engine(model=str(path), **each) for each in (config, {}))
    shared = [3 + i % 190 for i in range(22)]
    requests = [request_of(i, [*shared, *[9 + i] * 9], max_tokens=3) for i in range(3)]
    results = [run(engine, [request])[request.id] for request in requests]
    assert [result.outputs[0].cached_tokens for result in results] == [0, 0, 20]
    assert [result.tokens for result in results] == [tokens_of(plain, [each])[0] for each in requests]
    engine.assert_whole()


@pytest.mark.all
def test_a_prompt_goes_on_from_copies_that_a_scan_made(
    path: Path,
    tiny_engine: MakeEngine,
    late_engine: MakeEngine,
    caching: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies at 64 and 128 are made within the step of a prompt, also by graphs. On a GPU this step ends at
    148, since no scanned chunk does."""
    prompt = [3 + i * i % 190 for i in range(150)]
    prompts = [prompt, *([*prompt[:n], 7, 8, 9] for n in (70, 130, 150))]
    requests = [request_of(i, ids, max_tokens=6, ignore_eos=True) for i, ids in enumerate(prompts)]
    plain = tiny_engine(model=str(path))
    expected = [tokens_of(plain, [request])[0] for request in requests]
    config = caching(12)
    monkeypatch.setattr("baton.engine.engine.COPY_TOKENS", 64)
    engine = late_engine(model=str(path), **config, num_blocks=200, max_num_batched_tokens=256)
    lengths: list[list[int]] = []
    build = step_loop.build_step

    def build_step(schedule: Schedule, *args: Any, **others: Any) -> Any:
        lengths.append([len(positions) for positions in schedule.chunks.values()])
        return build(schedule, *args, **others)

    monkeypatch.setattr(step_loop, "build_step", build_step)
    results = [run(engine, [request]).popitem()[1] for request in requests]
    assert [result.tokens for result in results] == expected
    assert [result.outputs[0].cached_tokens for result in results] == [0, 64, 128, 148]
    assert lengths[0] == [150 if engine.runner.chunk_tokens == 1 else 148]
    engine.assert_whole()


def test_a_chunk_ends_where_its_scan_cannot_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans copy states after each 16 tokens of a chunk. This prompt of 60 tokens gets copies at 24, 48 and
    56."""
    monkeypatch.setattr(state_copies, "END_TOKENS", 4)
    copies = StateCopies(0, 8, interval=24, block_size=8, chunk_tokens=16)

    def taken(start: int, stop: int) -> tuple[list[int], int]:
        wanted = Wanted(0)
        return [*copies.positions(wanted, start, stop, 60)], copies.cut(wanted, start, stop, 60)

    assert taken(8, 60) == ([24, 48], 48), "24 is the end of a scanned chunk, and 48 is none"
    assert taken(8, 48) == ([24, 48], 48)
    assert taken(8, 40) == ([24], 40)
    assert taken(48, 60) == ([56], 56)
    assert taken(40, 60) == ([48], 48)
    assert taken(32, 60) == ([48, 56], 56)
    assert taken(56, 60) == ([], 60)


def test_copies_need_memory(
    path: Path,
    tiny_engine: MakeEngine,
    caching: Callable[..., dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ignored = "--host-cache-size is ignored: no room for copies of states"
    engine = tiny_engine(model=str(path), **caching(0), host_cache_size=1 << 20)
    assert engine.lives.cache is None
    for message in ("prefix caching is off: ", ignored):
        assert any(message in said for said in caplog.messages)
    caplog.clear()
    engine = tiny_engine(model=str(path), **caching(6), host_cache_size=engine.block_bytes)
    assert not engine.offload
    assert ignored in caplog.text


def test_ranks_that_do_not_divide_the_mamba_heads_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Bamba", mamba_n_heads=2, mamba_d_head=64)
    check_model(EngineConfig(str(tmp_path), tensor_parallel_size=2))
    message = r"size 4: .* 2 state heads in 2 groups; choose one of 1, 2$"
    assert_refused(tmp_path, message, tensor_parallel_size=4)


def test_each_rank_holds_the_states_of_its_heads(tmp_path: Path, ranks: Callable[..., Engine]) -> None:
    """x of the heads of the rank, and one of the two groups, which four ranks hold twice."""
    save_tiny(tmp_path, "Bamba")
    states = [ranks(tmp_path, size, max_num_seqs=3).runner.cache.of_layers[0] for size in (1, 4)]
    assert [state.ssm.shape for state in states] == [(3, 8, 16, 16), (3, 2, 16, 16)]
    assert [state.conv.shape for state in states] == [(3, 3, 128 + 2 * 32), (3, 3, 32 + 2 * 16)]


class Steps:
    """A scheduler with one cached copy of states, after 8 tokens that `request` begins with. Its steps are
    launched, and land later."""

    def __init__(self, copies: int = 1) -> None:
        kept = StateCopies(4, copies, interval=8, block_size=4, chunk_tokens=4)
        self.scheduler = make(64, budget=8, states=4, prefix_cache=True, copies=kept)
        live = add(self.scheduler, 1, 10)
        for schedule, restores in (self.launch(), self.launch()):
            assert restores == []
            schedule.end_leases()
        self.scheduler.lives.memory.publish(live, 10)
        self.scheduler.lives.drop(live)

    def launch(self) -> tuple[Schedule, list[tuple[int, int]]]:
        """The schedule, and the slots of states to copy."""
        schedule = self.scheduler.schedule()
        states = self.scheduler.lives.memory.states
        assert states is not None
        restores = states.take_restores(schedule)
        states.saves(schedule.chunks)
        self.scheduler.launched(schedule)
        return schedule, restores

    def import_from(self, first: int) -> int | None:
        """The slot that an import of another prompt gets for its states."""
        exchange = self.scheduler.lives.prefix_exchange
        assert exchange is not None
        missing = exchange.missing(EngineRequest(b"i", list(range(first, first + 80))), 1)
        assert missing is not None
        if (started := exchange.start_import(missing)) is None:
            return None
        started.end(0)
        return started.state_slot


@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_writes_to_a_copy_that_a_launched_step_begins_with(cancelled: bool) -> None:
    """The device may be behind. An import writes beside its steps."""
    steps = Steps()
    live = add(steps.scheduler, 2, 12)
    schedule, restores = steps.launch()
    assert schedule.chunks == {live: range(8, 12)}
    [(copy, to)] = restores
    assert to == live.state_slot
    if cancelled:
        steps.scheduler.lives.drop(live)
    assert steps.import_from(100) is None
    schedule.end_leases()
    assert steps.import_from(100) == copy
    if not cancelled:
        steps.scheduler.lives.drop(live)
    steps.scheduler.lives.assert_whole()


def test_no_copy_is_taken_where_states_of_another_worker_come_meanwhile() -> None:
    """Those after the range before the next one are written layer by layer, while the step is under way. A
    copy after the step would have them."""
    scheduler = Steps(copies=4).scheduler
    prompt, ranges = list(range(200, 240)), [range(16), range(24, 40)]
    live = scheduler.lives.start_part(EngineRequest(b"part", prompt), ranges)
    assert live is not None
    copied: list[int] = []
    for _ in ranges:
        scheduler.lives.begin_range(live)
        while live.phase is Phase.RUNNING and (schedule := scheduler.schedule()).chunks:
            assert scheduler.lives.memory.states is not None
            copied += [save.position for save in scheduler.lives.memory.states.saves(schedule.chunks)]
            scheduler.launched(schedule)
            schedule.end_leases()
    assert copied == [8, 32, 40]
    scheduler.lives.drop(live)
    scheduler.lives.assert_whole()


def test_a_part_computes_the_states_that_other_workers_need() -> None:
    """A step hands over the states at its end. The cache has those after 8 positions, too."""
    scheduler = Steps().scheduler
    for stop, computed in ((8, 0), (12, 8)):
        live = scheduler.lives.start_part(EngineRequest(b"part", list(range(24))), [range(stop)])
        assert live is not None
        assert [*live.shared.ranges] == [range(computed, stop)]
        scheduler.lives.drop(live)
    scheduler.lives.assert_whole()


@pytest.mark.parametrize("steps_until_it_ends", [0, 1])
def test_no_step_copies_states_of_a_request_that_it_does_not_compute(steps_until_it_ends: int) -> None:
    """Such a request may end while the step is under way, and another one gets its slot at once."""
    steps = Steps()
    first = steps.scheduler.lives.add(
        EngineRequest(b"first", list(range(100, 140)), priority=-1), handover=False
    )
    late = steps.scheduler.lives.start(EngineRequest(b"late", list(range(12))))
    assert late is not None
    schedules = [steps.launch() for _ in range(steps_until_it_ends)]
    assert all(late not in schedule.chunks and restores == [] for schedule, restores in schedules)
    slot = late.state_slot
    steps.scheduler.lives.drop(late)
    reserved = steps.scheduler.lives.reserve(EngineRequest(b"reserved", list(range(200, 210))))
    assert reserved is not None
    assert reserved.state_slot == slot
    for schedule, _ in schedules:
        schedule.end_leases()
    for live in (first, reserved):
        steps.scheduler.lives.drop(live)
    steps.scheduler.lives.assert_whole()


def test_a_lent_copy_is_neither_evicted_nor_written() -> None:
    copies = StateCopies(0, 2, interval=64, block_size=64, chunk_tokens=64)
    for name in (b"a", b"b"):
        slot = copies.allocate()
        assert slot is not None
        copies.name(slot, name)
    lent = copies.lend(b"a")
    assert lent is not None
    leases = [lent, copies.lend(b"a")]
    assert copies.allocate() == 1 - lent.slot
    assert b"b" not in copies, "it was used later, and is evicted first"
    copies.forget(b"a")
    for lease in leases:
        assert copies.allocate() is None
        assert lease is not None
        lease.end()
        with pytest.raises(AssertionError, match="a lease ends once"):
            lease.end()
    assert copies.allocate() == lent.slot
