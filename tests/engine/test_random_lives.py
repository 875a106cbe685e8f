"""Requests arrive, join, resume, end and are cancelled at random moments, on two engines with late devices.

Each request gets the tokens that an engine without overlap gives it, up to its end. Both engines are whole
afterwards.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from baton.engine import Engine, EngineRequest, Output, SpeculativeConfig, StructuredOutput
from baton.engine.core import state_copies
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.prefix_exchange import Import
from baton.engine.execution import memory_sizing
from baton.engine.execution.runner import Launched, ModelRunner
from baton.engine.kernels import LayerState, parts
from baton.engine.step import Step
from baton.kv_names import CHUNK_TOKENS
from tests.engine.conftest import (
    LateEvent,
    MakeEngine,
    Result,
    TinyOf,
    request_of,
    run,
    save_spelled_tokenizer,
)
from tests.engine.draft_checkpoints import random_eagle
from tests.engine.drafting import draft_always
from tests.engine.scheduling import end, hooks_to, live_of, of_slots
from tests.engine.test_disaggregation import copy_kv

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9},
    {"temperature": 1.0, "min_tokens": 6, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "stop_token_ids": tuple(range(3, 60))},
    {"stop_token_ids": tuple(range(3, 150)), "min_tokens": 3},
    {"temperature": 1.2, "frequency_penalty": 0.7},
    {"temperature": 1.0, "structured_output": StructuredOutput("regex", "[a-z]{2,9}!")},
    {
        "temperature": 1.0,
        "structured_output": StructuredOutput("regex", "(ab|cd){5,9}"),
        "frequency_penalty": 0.1,
    },
]
BLOCK = 4


def requests_of() -> list[EngineRequest]:
    """Random requests. Most share a prefix with some others."""
    rng = random.Random(5)
    trunks = [[rng.randrange(3, 190) for _ in range(40)] for _ in range(3)]
    requests = []
    for number in range(48):
        prompt = rng.choice(trunks)[: rng.choice([1, 4, 8, 9, 16, 21, 33])]
        prompt = prompt + [rng.randrange(3, 190) for _ in range(rng.choice([0, 1, 5]))]
        kind = rng.choice(KINDS)
        most = max(rng.choice([1, 2, 3, 9, 14]), kind.get("min_tokens", 0))
        sampling = {"max_tokens": most, "seed": number, **kind}
        requests.append(request_of(number, prompt, priority=rng.choice([0, 0, 0, 1]), **sampling))
        requests[-1].alone = rng.random() < 0.05
    return requests


class Lives:
    """A prefill and a decode engine, and all calls that workers may make."""

    def __init__(self, prefill: Engine, decode: Engine, expected: dict[bytes, Any]) -> None:
        self.prefill = prefill
        self.decode = decode
        self.expected = expected
        self.tables: dict[bytes, list[int]] = {}
        self.moved: dict[bytes, Counter[int]] = {}  # positions by layer, of prefills
        self.first: dict[bytes, Output] = {}  # first tokens of held requests that wait for a reservation
        self.reserved: dict[bytes, tuple[EngineRequest, LiveRequest]] = {}
        self.got: dict[bytes, list[int]] = {}
        self.where: dict[bytes, Engine] = {}
        self.written: dict[int, set[int]] = {}  # blocks, by id() of what a launched step computes
        self.slots: dict[int, set[int]] = {}  # the same, of the slots of states that it reads or writes
        self.of_prefill: dict[bytes, int] = {}  # slots of the states of prefills
        self.layers = prefill.model_config.num_layers + (prefill.runner.drafter is not None)
        self.resumed: set[bytes] = set()
        self.ahead = self.unsampled = self.cancelled_halfway = self.imports = 0
        self.cached = 0  # positions that reservations found in the prefix cache
        prefill.loop.hooks = hooks_to(self)
        for engine in (prefill, decode):
            engine.runner.run = partial(self.run, engine.runner)

    def prefill_started(self, live: LiveRequest) -> None:
        assert live.owner not in self.moved, "the sender has it already"
        self.tables[live.owner], self.of_prefill[live.owner] = list(live.blocks), live.state_slot
        self.moved[live.owner] = Counter(dict.fromkeys(range(self.layers), live.num_cached))

    def layer_done(self, layer: int, chunks: Any) -> None:
        for request_id, chunk in chunks.items():
            assert self.moved[request_id][layer] == chunk.start
            self.moved[request_id][layer] = chunk.stop

    def forget(self, request_id: bytes) -> None:
        """As the role and its sender do: nothing may name this prefill from now on."""
        for table in (self.tables, self.moved, self.of_prefill):
            table.pop(request_id, None)

    def run(self, runner: ModelRunner, step: Step, layer_done: Any) -> Launched:
        launched = ModelRunner.run(runner, step, layer_done)
        self.written[id(launched)] = set((step.slots // BLOCK).tolist())
        used = [*step.state_slots, *step.restores.flat, *step.saves.flat, *(step.state_copies - 1)]
        self.slots[id(launched)] = set(map(int, used)) - {-1}
        return launched

    def step(self, engine: Engine) -> None:
        result = engine.loop.step()
        self.ahead += len(engine.loop.under_way) == 2
        self.unsampled += any(not launched.is_sampled for _, launched in engine.loop.under_way)
        assert not result.failed
        assert not result.refused
        for output in result.outputs:
            self.emit(output)
            if engine is self.prefill and output.id in self.tables and not output.finish_reason:
                self.first[output.id] = output
            elif output.finish_reason:
                self.ended(output)
        for request_id in result.preempted:
            del self.where[request_id]

    def emit(self, output: Output) -> None:
        assert output.id in self.where, "of a request that has ended"
        got = self.got.setdefault(output.id, [])
        assert output.output_index == len(got), "lost or repeated"
        got.append(output.token)
        assert got == self.expected[output.id].tokens[: len(got)]

    def ended(self, output: Output) -> None:
        assert self.got[output.id] == self.expected[output.id].tokens
        assert output.finish_reason == self.expected[output.id].finish_reason
        if self.where.pop(output.id) is self.prefill:
            self.forget(output.id)
            end(self.prefill, output.id)

    def reserve(self, request: EngineRequest) -> None:
        reserved = self.decode.reserve(request)
        if reserved is not None:
            self.reserved[request.id] = request, reserved

    def hand_over(self, request_id: bytes) -> None:
        request, target = self.reserved.pop(request_id)
        first, count = self.first.pop(request_id), len(request.prompt_ids)
        assert self.moved[request_id] == Counter(dict.fromkeys(range(self.layers), count))
        assert self.under_way(self.decode, self.written).isdisjoint(target.blocks)
        copy_kv(self.prefill, self.tables[request_id], self.decode, target, count)
        if request_id in self.of_prefill:
            slot = self.of_prefill[request_id]
            assert target.state_slot not in self.under_way(self.decode, self.slots)
            for source, to in zip(of_slots(self.prefill), of_slots(self.decode), strict=True):
                to[target.state_slot] = source[slot]
        self.cached += target.num_cached
        self.forget(request_id)
        end(self.prefill, request_id)
        self.where[request_id] = self.decode
        again = self.decode.join(live_of(self.decode, request_id), first.token, first.logprobs)
        assert again[:5] == first[:5]

    def resume(self, request_id: bytes) -> None:
        again = self.prefill.resume(live_of(self.prefill, request_id), request_id)
        if again is not None:
            first = self.first.pop(request_id)
            assert again[:5] == first[:5]
            self.forget(request_id)
            self.resumed.add(request_id)
            if request_id in self.reserved:
                self.reserved.pop(request_id)
                end(self.decode, request_id)

    def cancel(self, request_id: bytes) -> None:
        for table in (self.where, self.first, self.reserved):
            table.pop(request_id, None)
        self.forget(request_id)
        end(self.prefill, request_id)
        end(self.decode, request_id)

    def live(self, requests: list[EngineRequest], rng: random.Random) -> None:
        todo = requests.copy()
        rng.shuffle(todo)
        while todo or self.where:
            if todo and rng.random() < 0.4:
                request = todo.pop()
                engine = rng.choice([self.prefill, self.decode])
                match rng.randrange(4):
                    case 0:
                        engine.add(request)
                        self.where[request.id] = engine
                    case 1:
                        if engine.start(request) is not None:
                            self.where[request.id] = engine
                    case _:
                        self.prefill.add(request, handover=True)
                        self.where[request.id] = self.prefill
            by_id = {request.id: request for request in requests}
            for request_id in sorted(self.first.keys() - self.reserved.keys()):
                self.reserve(by_id[request_id])
            for request_id in sorted(self.first.keys() & self.reserved.keys()):
                if rng.random() < 0.5:
                    self.hand_over(request_id)
            for request_id in sorted(self.first):
                if rng.random() < 0.1:
                    self.resume(request_id)
            if self.where and rng.random() < 0.04:
                self.cancel(rng.choice(sorted(self.where)))
            if (halfway := self.halfway()) and rng.random() < 0.8:
                self.cancelled_halfway += 1
                self.cancel(rng.choice(halfway))
            for engine in rng.sample([self.prefill, self.decode], rng.randrange(3)):
                if engine.loop.has_work:
                    self.step(engine)
                self.garble(engine)
                if rng.random() < 0.5:
                    self.fail_to_import(engine, rng)
        for engine in (self.prefill, self.decode):
            while engine.loop.has_work:
                self.step(engine)
            assert engine.idle
            engine.assert_whole()

    def halfway(self) -> list[bytes]:
        """Prompts in a step that is launched, but not sampled."""
        schedules = [
            schedule for schedule, launched in self.prefill.loop.under_way if not launched.is_sampled
        ]
        return [
            live.id
            for schedule in schedules
            for live in schedule.prompts
            if live.handover and live.id in self.where
        ]

    @staticmethod
    def under_way(engine: Engine, used: dict[int, set[int]]) -> set[int]:
        """What launched steps may be using."""
        return set[int]().union(*(used[id(launched)] for _, launched in engine.loop.under_way))

    def garble(self, engine: Engine) -> None:
        """Overwrites all free blocks and slots of states: no request may depend on their content."""
        scheduler = engine.scheduler
        states = [] if scheduler.lives.states is None else [*scheduler.lives.states._free]
        if scheduler.lives.cache is not None and scheduler.lives.cache.copies is not None:
            states = [*states, *scheduler.lives.cache.copies._free]
        self.overwrite(engine, [*scheduler.lives.pool._free], states)

    def overwrite(self, engine: Engine, blocks: Sequence[int], states: Sequence[int]) -> None:
        assert self.under_way(engine, self.written).isdisjoint(blocks)
        assert self.under_way(engine, self.slots).isdisjoint(states)
        for kv in engine.caches:
            if not isinstance(kv, LayerState):
                parts(kv)[0][:, blocks] = 1e4
        for tensor in of_slots(engine):
            tensor[states] = 1e4

    def fail_to_import(self, engine: Engine, rng: random.Random) -> None:
        """What comes from other workers or a store takes blocks and slots beside the steps under way."""
        exchange, begun = engine.prefix_exchange, list[Import]()
        if exchange is None:
            return
        for _ in range(3):
            prompt = [rng.randrange(3, 190) for _ in range(CHUNK_TOKENS + 1)]
            missing = exchange.missing(request_of(999, prompt), 1)
            if missing is None or (started := exchange.start_import(missing)) is None:
                break
            begun.append(started)
            slot = started.state_slot
            self.overwrite(engine, started.held.blocks, [] if slot is None else [slot])
        for started in begun:
            started.end(0)
        self.imports += len(begun)


@pytest.fixture(scope="module")
def expected_of(tiny_engine: MakeEngine) -> Callable[[Path], dict[bytes, Result]]:
    """What an engine without overlap answers, by model."""
    return cache(
        lambda path: run(
            tiny_engine(model=str(path), num_blocks=2048, max_num_batched_tokens=4096), requests_of()
        )
    )


@pytest.mark.all
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            {"num_blocks": 14, "max_num_seqs": 5, "max_num_batched_tokens": 24},
            id="small pool",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {
                "num_blocks": 14,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 8,
                "enable_prefix_caching": True,
            },
            id="small pool, prefix cache",
        ),
        pytest.param({"max_num_seqs": 2, "max_num_batched_tokens": 9}, id="two seats"),
        pytest.param(
            {
                "num_blocks": 14,
                "max_num_seqs": 5,
                "max_num_batched_tokens": 24,
                "enable_prefix_caching": True,
                "speculative_config": SpeculativeConfig(),
            },
            id="drafts",
        ),
        *(
            pytest.param(
                {
                    "model": model,
                    "num_blocks": 34,
                    "max_num_seqs": 5,
                    "max_num_batched_tokens": 24,
                    "enable_prefix_caching": True,
                    **drafts,
                },
                id=f"{model}{' drafts' * bool(drafts)}",
                marks=marks,
            )
            for model, drafts, marks in (
                ("Bamba", {}, ()),
                ("Qwen3Next", {}, pytest.mark.long),
                ("Bamba", {"speculative_config": SpeculativeConfig()}, pytest.mark.long),
            )
        ),
        pytest.param(
            {
                "num_blocks": 14,
                "max_num_seqs": 5,
                "max_num_batched_tokens": 24,
                "enable_prefix_caching": True,
                "speculative_config": None,
            },
            id="draft head",
        ),
    ],
)
def test_random_lives(
    expected_of: Callable[[Path], dict[bytes, Result]],
    late_engine: MakeEngine,
    spelled_path: Path,
    tmp_path: Path,
    tiny_of: TinyOf,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
) -> None:
    monkeypatch.setattr("baton.engine.engine.COPY_TOKENS", 8)
    monkeypatch.setattr(state_copies, "END_TOKENS", 4)
    monkeypatch.setattr(state_copies, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(memory_sizing, "_num_copies", lambda *_: 2)
    path, config = spelled_path, config.copy()
    if kind := config.pop("model", None):
        path = tmp_path
        for file in tiny_of(kind).iterdir():
            (path / file.name).symlink_to(file)
        save_spelled_tokenizer(path)
    rng = random.Random(4)
    by_head = "speculative_config" in config and config["speculative_config"] is None
    if by_head:
        random_eagle(tmp_path, spelled_path, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        config = {**config, "speculative_config": SpeculativeConfig("eagle3", model=str(tmp_path))}

    class SometimesLate(LateEvent):
        def query(self) -> bool:
            if not self._passed and rng.random() < 0.2:
                self.synchronize()
            return self._passed

    def engine() -> Engine:
        late = late_engine(model=str(path), cuda_graphs=False, block_size=BLOCK, **config)
        late.runner._record = SometimesLate
        return late

    prefill, decode = engine(), engine()
    requests = requests_of()
    expected = expected_of(path)
    if "speculative_config" in config:
        for each in (prefill, decode):
            known = {key: result.tokens for key, result in expected.items()}
            draft_always(each, None if by_head else known, wrong=0.3)
    few_blocks, cancelled_halfway, preempted = config.get("num_blocks", 99) <= 20, 0, 0
    prefix_caching = config.get("enable_prefix_caching", False)
    ahead = unsampled = resumed = cached = 0
    for number in range(40):
        lives = Lives(prefill, decode, expected)
        lives.live(requests, rng)
        ahead, unsampled = ahead + lives.ahead, unsampled + lives.unsampled
        resumed += len(lives.resumed)
        cancelled_halfway += lives.cancelled_halfway
        cached += lives.cached
        preempted = sum(each.stats().preemptions for each in (prefill, decode))
        # A grammar is ready when its thread has compiled it, so lives differ. Most have a preemption.
        shown = ahead > 60 and unsampled > 10 and resumed > 4 and (cached or not prefix_caching)
        if number and shown and (cancelled_halfway or not by_head) and (preempted or not few_blocks):
            break
    assert shown, "of steps ahead, of grammars, of requests that go on where they were prefilled, or of hits"
    assert prefix_caching or not cached
    assert cancelled_halfway or not by_head, "nor of the layer of a draft head"
    assert preempted or not few_blocks
    assert not kind or lives.imports > 20
