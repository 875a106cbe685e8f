"""A prefill and a decode engine together give the tokens of a single engine.

The test copies KV between them by position.
"""

import itertools
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from baton.engine import (
    Engine,
    EngineRequest,
    Output,
    SpeculativeConfig,
    StructuredOutput,
)
from baton.engine.core.live_request import LiveRequest
from baton.engine.kernels import LayerState, parts
from baton.worker.engine_process.paged_kv import paged_kv
from tests.engine.conftest import MakeEngine, TinyOf, request_of, run
from tests.engine.draft_checkpoints import random_eagle
from tests.engine.scheduling import end, hooks_to, live_of


class Pair:
    """A prefill and a decode engine. Does the work of workers and router between them."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill = prefill
        self.decode = decode
        self.tables: dict[bytes, Sequence[int]] = {}
        self.outputs: dict[bytes, list[Output]] = {}
        self.handed_back: list[bytes] = []
        self.copied = 0  # positions
        prefill.loop.hooks = hooks_to(self)

    def prefill_started(self, live: LiveRequest) -> None:
        self.tables[live.owner] = list(live.blocks)

    def run(self, requests: Sequence[EngineRequest]) -> dict[bytes, list[int]]:
        """Serves them all, injecting between decode steps. What the decode engine hands back starts anew."""
        todo = {request.id: request for request in requests}
        self.outputs = {request.id: [] for request in requests}
        for request in requests:
            self.prefill.add(request, handover=True)
        ready: list[Output] = []
        while not (self.prefill.idle and self.decode.idle):
            result = self.prefill.loop.step()
            self.emit(result.outputs)
            for output in result.outputs:
                if output.finish_reason:
                    end(self.prefill, output.id)
                else:
                    ready.append(output)
            ready = [output for output in ready if not self.hand_over(todo[output.id], output)]
            result = self.decode.loop.step()
            self.emit(result.outputs)
            for request_id in result.preempted:
                self.handed_back.append(request_id)
                request = todo[request_id]
                emitted = [output.token for output in self.outputs[request_id]]
                todo[request_id] = EngineRequest(request_id, request.prompt_ids, emitted, request.sampling)
                self.prefill.add(todo[request_id], handover=True)
        self.prefill.assert_whole()
        self.decode.assert_whole()
        return {request_id: [o.token for o in outputs] for request_id, outputs in self.outputs.items()}

    def emit(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            assert output.output_index == len(self.outputs[output.id]), "lost or repeated"
            self.outputs[output.id].append(output)

    def hand_over(self, request: EngineRequest, first: Output) -> bool:
        target = self.decode.reserve(request)
        if target is None:
            return False
        count = len(request.prompt_ids) + len(request.output_ids)
        copy_kv(self.prefill, self.tables[request.id], self.decode, target, count)
        self.copied += count - target.num_cached
        end(self.prefill, request.id)
        again = self.decode.join(live_of(self.decode, request.id), first.token, first.logprobs)
        assert (again.output_index, again.token) == (first.output_index, first.token)
        return True


def copy_kv(
    source: Engine, source_blocks: Sequence[int], target: Engine, reserved: LiveRequest, count: int
) -> None:
    """Copies the KV that the reservation lacks, of the first `count` positions."""

    def slots(blocks: Sequence[int], block_size: int) -> torch.Tensor:
        positions = range(reserved.num_cached, count)
        return torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in positions])

    there, here = slots(source_blocks, source.block_size), slots(reserved.blocks, target.block_size)
    if len(there):
        for source_kv, target_kv in zip(source.caches, target.caches, strict=True):
            if target_kv is not None and not isinstance(target_kv, LayerState):
                parts(target_kv)[0].flatten(1, 2)[:, here] = parts(source_kv)[0].flatten(1, 2)[:, there]


@pytest.mark.cases(1)
@pytest.mark.parametrize("prefill_blocks", [16, 40], ids=["evictions on prefill", "all fits"])
@pytest.mark.parametrize("decode_blocks", [24, 99], ids=["evictions on decode", "all fits"])
def test_chats_of_several_turns_copy_only_what_decode_lacks(
    tiny_engine: MakeEngine, prefill_blocks: int, decode_blocks: int
) -> None:
    caching = {"enable_prefix_caching": True, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    prefill = tiny_engine(block_size=8, num_blocks=prefill_blocks, **caching)
    pair = Pair(prefill, tiny_engine(block_size=4, num_blocks=decode_blocks, **caching))
    rng = random.Random(2)
    history = {number: [rng.randrange(3, 199) for _ in range(9 + 3 * number)] for number in range(3)}
    missing = 0
    for turn in range(5):
        requests = [
            request_of(10 * turn + number, prompt, max_tokens=6, ignore_eos=True)
            for number, prompt in history.items()
        ]
        answers = pair.run(requests)
        single = run(tiny_engine(num_blocks=512, max_num_batched_tokens=64), requests)
        assert answers == {request.id: single[request.id].tokens for request in requests}
        for (number, prompt), request in zip(history.items(), requests, strict=True):
            known = (len(prompt) - 5) // 4 * 4 if turn else 0  # the last token of an answer has no KV
            missing += len(prompt) - known
            history[number] = [*prompt, *answers[request.id], *[rng.randrange(3, 199) for _ in range(4)]]
    if decode_blocks == 99:
        assert pair.copied == missing
    else:
        assert missing < pair.copied < sum(len(prompt) * 3 for prompt in history.values())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "sampling", [{"ignore_eos": True}, {"structured_output": StructuredOutput("regex", "[a-c]{40}")}]
)
def test_a_reservation_grows_when_the_prompt_is_prefilled_again(
    tiny_engine: MakeEngine, spelled_path: Path, sampling: dict[str, Any]
) -> None:
    """The first prefill died after its first token was emitted. The second has the prompt and this token."""

    def engine(**config: Any) -> Engine:
        return tiny_engine(model=str(spelled_path), **config)

    request = request_of(1, range(3, 14), max_tokens=9, **sampling)
    expected = run(engine(), [request])[request.id].tokens
    prefill, decode = engine(), engine(num_blocks=5)
    neighbour = request_of(2, [1])
    assert decode.reserve(neighbour)
    reserved = decode.reserve(request)
    assert reserved is not None
    before = list(reserved.blocks)
    assert len(before) == 3
    longer = EngineRequest(request.id, request.prompt_ids, expected[:2], request.sampling)
    assert decode.extend_reservation(reserved, longer.output_ids)
    assert list(reserved.blocks[:3]) == before
    assert len(reserved.blocks) == 4
    assert not decode.extend_reservation(reserved, expected[:2] + [3] * 6), "the neighbour has the last"
    for length in (1, 9):
        with pytest.raises(ValueError, match=f"{length} output_ids, but 2 to 8 are possible"):
            decode.extend_reservation(reserved, [3] * length)
    with pytest.raises(ValueError, match="first 2 output_ids are not those"):
        decode.extend_reservation(reserved, [*reversed(expected[:2]), 3])
    end(decode, neighbour.id)
    pair = Pair(prefill, decode)
    prefill.add(longer, handover=True)
    outputs: list[Output] = []
    while not outputs:  # a grammar may still be being compiled
        outputs += prefill.loop.step().outputs
    (first,) = outputs
    assert first.output_index == 2
    copy_kv(prefill, pair.tables[request.id], decode, reserved, 13)
    end(prefill, request.id)
    outputs = [decode.join(live_of(decode, request.id), first.token, first.logprobs)]
    while decode.loop.has_work:
        outputs += decode.loop.step().outputs
    assert [(o.output_index, o.token) for o in outputs] == list(enumerate(expected))[2:]
    prefill.assert_whole()
    decode.assert_whole()


def test_a_join_can_end_the_request(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine()
    request = request_of(1, [3, 4, 5], [6], max_tokens=2)
    assert engine.reserve(request) is not None
    output = engine.join(live_of(engine, request.id), 7)
    assert (output.output_index, output.token, output.finish_reason) == (1, 7, "length")
    engine.assert_whole()


class KnownLimit:
    """A chunk limit of 16 tokens if a request joins within an hour, else 40. Notes the prompt tokens of each
    step."""

    gap_target = 0.0

    def __init__(self) -> None:
        self.taken: list[int] = []

    def tokens(
        self, batch: object, prompts: object, now: float, joins_at: float, encoding: float = 0.0
    ) -> int:
        return 16 if joins_at <= now + 3600 else 40

    def record(self, decodes: int, prompt_tokens: int, *_: float) -> None:
        self.taken.append(prompt_tokens)


def test_the_chunk_limit_knows_when_a_request_joins(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, limit = tiny_engine(), KnownLimit()
    monkeypatch.setattr(engine.meters, "chunk_limit", limit)
    monkeypatch.setattr(engine.meters, "record", limit.record)
    engine.add(request_of(1, [3, 4, 5], max_tokens=20, ignore_eos=True))
    for _ in range(2):
        engine.loop.step()
    limit.taken.clear()
    joining = request_of(3, [3, 4, 5], max_tokens=9, ignore_eos=True)
    reserved = engine.reserve(joining)
    assert reserved is not None
    for kv in engine.caches:
        parts(kv)[0][:, list(reserved.blocks)] = 0
    engine.add(request_of(2, [3, 4] * 106))
    engine.loop.step()
    now = time.monotonic()
    for joins_at in (now, now + 1, now - 1e6, math.inf):  # the third transfer stalls
        engine.loop.joins_at = joins_at
        engine.loop.step()
    engine.join(live_of(engine, joining.id), 7)
    for _ in range(2):
        engine.loop.step()
    assert limit.taken == [40, 16, 16, 40, 40, 16, 40]


LIST = StructuredOutput(
    "json_schema",
    """{"type": "array", "minItems": 3, "maxItems": 9, "items": {"anyOf": [
    {"type": "integer", "minimum": -99, "maximum": 99}, {"type": "string", "pattern": "^[a-z]{1,9}$"}]}}""",
)


@pytest.mark.all
@pytest.mark.parametrize("blocks", [30, 300], ids=["decode hands back", "room"])
def test_structured_output(tiny_engine: MakeEngine, spelled_path: Path, blocks: int) -> None:
    """The grammar of the decode engine starts after the given output and the token of the prefill engine."""

    def engine(**config: Any) -> Engine:
        return tiny_engine(model=str(spelled_path), **config)

    requests = [
        request_of(i, range(3, 9 + 4 * i), temperature=i % 3 / 2, seed=i, max_tokens=90,
                   structured_output=LIST if i % 4 else None)
        for i in range(12)
    ]  # fmt: skip
    pair = Pair(engine(max_num_batched_tokens=16, max_num_seqs=4), engine(num_blocks=blocks))
    tokens = pair.run(requests)
    assert bool(pair.handed_back) == (blocks == 30)
    single = run(engine(num_blocks=512), requests)
    assert tokens == {request.id: single[request.id].tokens for request in requests}
    tokenizer = Tokenizer.from_file(str(spelled_path / "tokenizer.json"))
    for i, request in enumerate(requests):
        if i % 4:
            assert pair.outputs[request.id][-1].finish_reason == "stop"
            assert 3 <= len(json.loads(tokenizer.decode(tokens[request.id][:-1]))) <= 9


def tensors_of(cache: Any) -> list[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        return [cache]
    return [x for part in cache for x in tensors_of(part)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        ("Llama", {"kv_cache_dtype": "fp8"}),
        ("DeepseekV2", {}),
        ("DeepseekV2", {"kv_cache_dtype": "fp8"}),
        ("GlmMoeDsa", {}),
        ("DeepseekV32", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        ("Bamba", {}),
        ("Bamba", {"state_dtype": "bfloat16"}),
        ("NemotronH", {}),
        ("GraniteMoeHybrid", {}),
        ("Qwen3Next", {}),
        ("KimiLinear", {}),
        ("Lfm2", {}),
        ("KimiLinear", {"kv_cache_dtype": "fp8"}),
        ("Llama with a draft head", {}),
    ],
)
def test_all_that_layers_keep_is_on_the_wire(
    kind: str, options: dict[str, Any], tiny_engine: MakeEngine, tiny_of: TinyOf, tmp_path: Path
) -> None:
    """Each byte is in a view that KV transfer copies, and in the layout that both sides compare."""
    kind, *head = kind.split(" with ")
    if head:
        random_eagle(tmp_path, tiny_of(kind), eagle_aux_hidden_state_layer_ids=[0, 1, 2])
        options = {"speculative_config": SpeculativeConfig("eagle3", model=str(tmp_path))}
    engine = tiny_engine(model=str(tiny_of(kind)), **options)
    wire, config = paged_kv(engine), engine.model_config
    assert len(engine.caches) == wire.layout.num_layers == config.num_layers + len(head)
    views: dict[int, int] = defaultdict(int)  # of each tensor, bytes
    for plane in itertools.chain.from_iterable(wire.planes):
        for layer in plane:
            assert isinstance(layer, torch.Tensor)
            views[layer.untyped_storage().data_ptr()] += layer.nbytes
    kept = [x for cache in engine.caches for x in tensors_of(cache)]
    assert views == {x.untyped_storage().data_ptr(): x.nbytes for x in kept if x.nbytes}
    slots = max((len(cache.ssm) for cache in engine.caches if isinstance(cache, LayerState)), default=0)
    each = {True: engine.num_blocks * engine.block_size, False: slots}
    of_arrays = zip(wire.layout.arrays, wire.layout.layers, strict=True)
    expected = sum(each[array.per_token] * array.bytes * len(layers) for array, layers in of_arrays)
    assert sum(views.values()) == expected
