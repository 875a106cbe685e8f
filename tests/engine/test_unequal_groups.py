"""A prefill and a decode engine with any numbers of ranks give the tokens of one engine with one rank.

The ranks are threads. KV goes through real transfer processes, while the prefill computes. On a GPU only the
cases run in which both engines have one rank.
"""

import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import baton.kv_transfer as kv
from baton.engine import Engine, EngineConfig, EngineRequest, SamplingParams, build_engine
from baton.engine.core.live_request import LiveRequest
from baton.engine.execution.rank import Follower
from baton.engine.execution.rank_files import RankFiles
from baton.engine.kernels import KV, Fp8KV, parts
from baton.engine.models.cache_spec import AttentionCache
from baton.kv_names.cache_kinds import HEAD_STATE, LATENT, STATE, CacheArray
from baton.kv_transfer.endpoint.other_ranks import OtherRanks
from baton.kv_transfer.endpoint.rank_copier import RankCopier
from baton.kv_transfer.wait import wait
from baton.prefill_worker.attempt import PrefillAttempt
from baton.prefill_worker.parts import SplitSteps
from baton.prefill_worker.role import SenderSink
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.engine_attempt import EngineAttempt, Reading, Resources
from baton.worker.engine_process.paged_kv import kv_layout as layout_of
from baton.worker.engine_process.paged_kv import paged_kv
from baton.worker.messages import Origin
from tests.device import DEVICE
from tests.engine.checkpoints import load
from tests.engine.conftest import save_tiny, tokens_of
from tests.engine.scheduling import end, hooks_to, live_of
from tests.engine.test_models import scores
from tests.kv_transfer.ranks import positions, rows_of
from tests.kv_transfer.transfer_process import TransferProcess
from tests.layouts import kv_layout
from tests.stand_in import stand_in
from tests.within import WITHIN

ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="two ranks cannot share a GPU")

SIZES = (1, 2, 3, 4)
BLOCK_SIZES = (16, 32, 128, 256)
CHUNKS = (24, 50, 100, 333)
WAVES = (
    ((300,), b"", (False, False)),
    ((1, 17, 320), b"", (True, True)),
    ((290, 64), b"at prefill", (True, False)),
    ((310,), b"at decode", (False, True)),
)
"""Prompts that are submitted together: their lengths, their salt, and whether prefill and decode have the
prefix in their caches."""
KV_HEADS = (12, 2, 1)
HEAD_DIM = 8 if DEVICE == "cpu" else 16
TIMES_2, TIMES_3 = (0, 2, 3, 1), (0, 3, 1, 2)  # in the field of four elements, whose sum is xor
SHORT = ((1, 1), (1, 2), (2, 4), (3, 1), (4, 3))
"""Numbers of ranks of the cases that are not long: each number is at both ends."""
CASES = [
    pytest.param(
        SIZES[i], SIZES[j], BLOCK_SIZES[i ^ j], BLOCK_SIZES[i ^ TIMES_2[j]], CHUNKS[i ^ TIMES_3[j]],
        id=f"{SIZES[i]}-to-{SIZES[j]}-ranks",
        marks=[*[ON_CPU] * (i + j > 0), *[pytest.mark.long] * ((SIZES[i], SIZES[j]) not in SHORT)],
    )
    for i in range(4) for j in range(4)
]  # fmt: skip
"""An orthogonal array: any two columns have all pairs of values. Each case has all kinds of prefix hits."""

PREFIX = 280
"""Tokens that all long prompts share."""
NO_TRACE = kv.TraceWriter(None, "")


class NotingSink(SenderSink):
    """Also notes what it learns of prefills."""

    def __init__(self) -> None:
        super().__init__(NO_TRACE)
        self.tables: dict[bytes, Sequence[int]] = {}
        self.in_windows: dict[bytes, Sequence[int]] = {}
        self.lengths: dict[bytes, int] = {}
        self.engine: Engine
        self.prefills: dict[bytes, PrefillAttempt] = {}
        self.cached: dict[bytes, int] = {}
        self.in_step: Callable[[int, Mapping[bytes, range]], None] = lambda layer, chunks: None
        """Is called when a layer is written. The engine goes on with its step afterwards."""

    def prefill_started(self, live: LiveRequest) -> None:
        request_id = live.owner
        self.tables[request_id] = list(live.blocks)
        self.lengths[request_id] = len(live.token_ids)
        self.cached[request_id] = live.num_cached
        prefill = self.prefills[request_id] = PrefillAttempt(
            shared=stand_in(Resources, engine=self.engine, sender=self.sender),
            stream=None,
            origin=Origin(request_id, "", "", 0.0),
            tokens=len(live.token_ids),
            handover=True,
            awaited=False,
        )
        prefill.live = live_of(self.engine, request_id)
        assert AttemptTable[EngineAttempt](lambda message: None).open(prefill)
        prefill.reading = Reading(prefill, request_id)
        of_prefill = {"owner": prefill, "token_ids": live.token_ids, "num_cached": live.num_cached}
        super().prefill_started(stand_in(LiveRequest, **of_prefill))

    def layer_done(self, layer: int, chunks: Mapping[Any, range]) -> bool:
        is_useless = super().layer_done(layer, {self.prefills[of]: chunk for of, chunk in chunks.items()})
        self.in_step(layer, chunks)
        return is_useless


class Side:
    """An engine with all its ranks, and the transfer process of its worker."""

    def __init__(
        self, path: Path, layout: kv.KVLayout | int, ranks: int, *, exports: bool = False, **config: Any
    ) -> None:
        """`layout`: a number of KV heads stands for that of a tiny Llama. `exports`: the other side reads
        slots in memory, too."""
        self.sink = NotingSink()
        if isinstance(layout, int):
            fp8 = config.get("kv_cache_dtype") == "fp8"
            layout = kv_layout(3, layout, HEAD_DIM, "float8_e4m3fn" if fp8 else "float32")
        self.transfer = TransferProcess(layout, slots=32, slot_bytes=16384, exports=exports)
        config = {"dtype": "float32", **config}
        settings = EngineConfig(
            str(path), device=DEVICE, tensor_parallel_size=ranks, num_threads=1, max_num_seqs=8, **config
        )  # fmt: skip
        self._files = RankFiles.create(ranks) if ranks > 1 else None
        ends = self.transfer.sending, self.transfer.receiving
        pairs = [kv.channel_pair() for _ in range(1, ranks)]
        followers: dict[int, Follower] = {}
        started = threading.Barrier(ranks)

        def follow(rank: int, files: RankFiles, rank0: socket.socket) -> None:
            followers[rank] = follower = Follower(settings, rank, files)
            copier = RankCopier(paged_kv(follower), rank0, *(end.arena for end in ends), exports=exports)
            started.wait(WITHIN)
            follower.run(lambda step: copier.layer_done if step.hands_over else lambda layer: None)

        self._threads = [
            threading.Thread(target=follow, args=(rank, self._files, theirs))
            for rank, (_, theirs) in enumerate(pairs, start=1)
        ]
        for thread in self._threads:
            thread.start()
        self.engine = build_engine(settings, files=self._files, hooks=hooks_to(self.sink))
        self.sink.engine = self.engine
        started.wait(WITHIN)
        assert layout_of(self.engine) == layout
        self._ranks = OtherRanks([ours for ours, _ in pairs])
        transport = kv.Transport(*ends, NO_TRACE, exports, ranks=self._ranks)
        self.sender = self.sink.sender = transport.sender(
            paged_kv(self.engine, lambda: self.sink.layers_ready)
        )
        self.receiver = transport.receiver(paged_kv(self.engine))
        self.sink.split = SplitSteps(self.receiver, self.sink.sender, lambda: None)
        ranks_of = self.engine, *(followers[rank] for rank in sorted(followers))
        attend = [isinstance(spec, AttentionCache) for spec in self.engine.cache_spec]
        self.caches = [list(itertools.compress(of.caches, attend)) for of in ranks_of]
        """Of each rank, the layers with KV."""
        self.windows = [of.arrays[0].window for of in itertools.compress(self.engine.cache_spec, attend)]
        self._heads = [layout.arrays[0].heads_of(rank, ranks) for rank in range(ranks)]

    def in_windows(self, blocks: Sequence[int]) -> Sequence[int]:
        """The blocks of these in layers with windows, as they are now."""
        window_blocks = self.engine.window_blocks
        return blocks if window_blocks is None else window_blocks[list(blocks)].tolist()

    def rows(self, blocks: Sequence[int], layer: int, start: int, stop: int) -> torch.Tensor:
        """[2, stop − start, heads, head_dim] of all ranks."""
        index = positions(blocks, self.engine.block_size, start, stop)
        return rows_of([exact(cache[layer]) for cache in self.caches], self._heads, index)

    def close(self) -> None:
        self.sender.shutdown()
        self.receiver.shutdown()
        self._ranks.close()
        self.engine.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a rank has not stopped"
        if self._files is not None:
            self._files.close()
        self.transfer.stop()


def exact(cache: KV) -> torch.Tensor:
    """The numbers that the cache of a layer stands for, in the shape of its values."""
    values, scales = parts(cache)
    return values if scales is None else values.float() * scales.transpose(2, 3)[..., None]


class Pair:
    """Does the work of workers and router between a prefill and a decode engine."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill = prefill
        self.decode = decode
        self.cached: list[int] = []
        """Positions in the prefix cache of decode, for each request."""
        self.reserved: dict[bytes, LiveRequest] = {}
        converts = len({isinstance(side.engine.caches[0], Fp8KV) for side in (prefill, decode)}) > 1
        self.most_error = 0.045 if converts else 0.0  # half a step of FP8

    def run(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Submits them together, serves them, and returns their tokens."""
        prefill, decode = self.prefill, self.decode
        tokens: dict[bytes, list[int]] = {request.id: [] for request in requests}
        for request in requests:
            self.reserved[request.id] = self._submit(request)
        while not (prefill.engine.idle and decode.engine.idle and prefill.sender.idle):
            if not (prefill.engine.loop.has_work or decode.engine.loop.has_work):
                wait([prefill.sender.fileno(), decode.receiver.fileno()], 0.001)
            for released in prefill.sender.poll():
                assert isinstance(released, kv.Released)
                assert released.reason == "acked"
                released.owner.end()
                end(prefill.engine, released.prefill_id)
            for output in prefill.engine.loop.step().outputs:
                prefill.sink.in_windows[output.id] = prefill.in_windows(prefill.sink.tables[output.id])
                prefill.sender.commit(output.id, kv.FirstToken(output.token))
            for event in decode.receiver.poll():
                assert isinstance(event, kv.Injected)
                self._assert_same(event.decode_id)
                joined = decode.engine.join(
                    live_of(decode.engine, event.decode_id), event.first_token.token_id
                )
                tokens[joined.id].append(joined.token)
            for output in decode.engine.loop.step().outputs:
                tokens[output.id].append(output.token)
        prefill.engine.assert_whole()
        decode.engine.assert_whole()
        assert decode.receiver.idle
        return list(tokens.values())

    @staticmethod
    def cache(side: Side, request: EngineRequest) -> None:
        """Computes the prefix of the request there, for its cache."""
        side.engine.add(replace(request, id=os.urandom(16), prompt_ids=request.prompt_ids[:PREFIX]))
        while side.engine.loop.has_work:
            side.engine.loop.step()

    def _submit(self, request: EngineRequest) -> LiveRequest:
        prefill, decode = self.prefill, self.decode
        prefill.engine.add(request, handover=True)
        prefill.sender.expect(request.id)
        reservation = decode.engine.reserve(request)
        assert reservation is not None
        self.cached.append(reservation.num_cached)
        decode.receiver.fetch(
            request.id, prefill_id=request.id, kv_address=prefill.transfer.address, attempt=0,
            incarnation=prefill.transfer.incarnation, block_ids=tuple(reservation.blocks),
            num_tokens=len(request.prompt_ids), start=reservation.num_cached,
            state_slot=reservation.state_slot,
        )  # fmt: skip
        return reservation

    def arrives(self, chunk: range) -> None:
        """Waits in mid-step until decode has the first layer of a chunk, and all layers of the tokens before
        it. Only then is more computed."""
        layout, deadline = self.prefill.transfer.layout, time.monotonic() + WITHIN
        positions = chunk.start * layout.num_layers + chunk.stop - chunk.start
        while self.decode.transfer.stats().bytes_received < positions * layout.arrays[0].bytes:
            assert time.monotonic() < deadline, "the first layer does not leave before the step is over"
            assert not self.decode.receiver.poll(), "a prefill without its first token is not complete"

    def _assert_same(self, request_id: bytes) -> None:
        """The K and V that decode got are those at prefill, bit for bit, or converted."""
        reservation = self.reserved[request_id]
        start, stop = reservation.num_cached, self.prefill.sink.lengths[request_id]
        for layer, window in enumerate(self.decode.windows):
            first, blocks, tables = start, reservation.blocks, self.prefill.sink.tables
            if window is not None:
                first, tables = max(start, window.first_read(stop)), self.prefill.sink.in_windows
                blocks = self.decode.in_windows(blocks)
            here = self.decode.rows(blocks, layer, first, stop)
            there = self.prefill.rows(tables[request_id], layer, first, stop)
            error = (here - there).abs().amax(dim=-1) / there.abs().amax(dim=-1)
            assert (error <= self.most_error).all(), f"layer {layer} differs"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, list[list[int]]]]:
    """The path of a tiny model with so many KV heads, and the tokens of an engine with one rank."""
    made: dict[int, tuple[Path, list[list[int]]]] = {}

    def make(kv_heads: int) -> tuple[Path, list[list[int]]]:
        if kv_heads not in made:
            path = tmp_path_factory.mktemp(f"{kv_heads}-heads")
            save_tiny(
                path, "Llama", hidden_size=12 * HEAD_DIM, num_attention_heads=12,
                num_key_value_heads=kv_heads, max_position_embeddings=512,
            )  # fmt: skip
            engine = load(path, device=DEVICE, num_blocks=200, num_threads=1)
            made[kv_heads] = path, tokens_of(engine, [request for wave in waves() for request in wave])
        return made[kv_heads]

    return make


def waves() -> list[list[EngineRequest]]:
    """The requests of `WAVES`."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, 199) for _ in range(400)]
    return [
        [
            EngineRequest(
                os.urandom(16),
                prompt[:PREFIX] + prompt[-(n - PREFIX) :] if n > PREFIX else prompt[-n:],
                sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
                cache_salt=salt,
            )
            for n in lengths
        ]
        for lengths, salt, _ in WAVES
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks", "prefill_blocks", "decode_blocks", "chunk"), CASES)
def test_the_tokens_are_those_of_one_rank(
    models: Callable[[int], tuple[Path, list[list[int]]]],
    prefill_ranks: int,
    decode_ranks: int,
    prefill_blocks: int,
    decode_blocks: int,
    chunk: int,
) -> None:
    """A group of 3 divides 12 KV heads and shares 1. 2 heads are shared by groups of 4.

    The first layer of each chunk of the first prompt arrives before the rest of the step is computed."""
    fits = [n for n in KV_HEADS if n % 3 == 0 or n == 1 or 3 not in (prefill_ranks, decode_ranks)]
    kv_heads = fits[(CHUNKS.index(chunk) + prefill_ranks) % len(fits)]
    path, expected = models(kv_heads)
    prefill = Side(
        path, kv_heads, prefill_ranks, block_size=prefill_blocks, num_blocks=24 + 1600 // prefill_blocks,
        max_num_batched_tokens=chunk, enable_prefix_caching=True,
    )  # fmt: skip
    decode = Side(
        path, kv_heads, decode_ranks, block_size=decode_blocks, num_blocks=24 + 1600 // decode_blocks,
        enable_prefix_caching=True,
    )  # fmt: skip
    with closing(prefill), closing(decode):
        pair, tokens = Pair(prefill, decode), []
        for wave, (_, _, hits) in zip(waves(), WAVES, strict=True):
            long = max(wave, key=lambda request: len(request.prompt_ids))
            if not any(hits):
                prefill.sink.in_step = lambda layer, chunks: None if layer else pair.arrives(*chunks.values())
            elif not all(hits):
                pair.cache(prefill if hits[0] else decode, long)
            tokens += pair.run(wave)
            prefill.sink.in_step = lambda layer, chunks: None
            cached = prefill.sink.cached[long.id], pair.reserved[long.id].num_cached
            full = (PREFIX // size * size for size in (prefill_blocks, decode_blocks))
            assert cached == tuple(size * hit for size, hit in zip(full, hits, strict=True))
    assert tokens == expected


@pytest.mark.all
@ON_CPU
@pytest.mark.parametrize(
    ("prefill_dtype", "decode_dtype", "prefill_ranks", "decode_ranks"),
    [("fp8", "fp8", 2, 3), ("auto", "fp8", 1, 2), pytest.param("fp8", "auto", 3, 1, marks=pytest.mark.long)],
)
def test_kv_in_fp8(
    models: Callable[[int], tuple[Path, list[list[int]]]],
    prefill_dtype: str,
    decode_dtype: str,
    prefill_ranks: int,
    decode_ranks: int,
) -> None:
    """Of equal formats the tokens are those of one engine. Else KV is converted, and the first token is that
    of an engine in the format of the prefill worker."""
    path, plain = models(12)
    requests = [request for wave in waves() for request in wave]
    single = load(path, kv_cache_dtype="fp8", num_blocks=200, num_threads=1)
    expected = tokens_of(single, requests) if prefill_dtype == "fp8" else plain
    both: dict[str, Any] = {"num_blocks": 99, "enable_prefix_caching": prefill_dtype == decode_dtype}
    prefill = Side(
        path,
        12,
        prefill_ranks,
        block_size=32,
        max_num_batched_tokens=50,
        kv_cache_dtype=prefill_dtype,
        **both,
    )
    decode = Side(path, 12, decode_ranks, block_size=16, kv_cache_dtype=decode_dtype, **both)
    with closing(prefill), closing(decode):
        tokens = [tokens for wave in waves() for tokens in Pair(prefill, decode).run(wave)]
    if prefill_dtype == decode_dtype:
        assert tokens == expected
    else:
        assert [found[0] for found in tokens] == [found[0] for found in expected]
        assert [len(found) for found in tokens] == [len(found) for found in expected]


def states(heads: int, head_dim: int, groups: int = 2) -> tuple[CacheArray, ...]:
    return (
        CacheArray(STATE, "x", 3, heads, head_dim, "float32"),
        CacheArray(STATE, "B", 3, groups, 16, "float32"),
        CacheArray(STATE, "C", 3, groups, 16, "float32"),
        CacheArray(HEAD_STATE, "ssm", 1, heads, head_dim * 16, "float32"),
    )


MAMBA = kv_layout(3, 2, 16, "float32", states(8, 16), (0, 2))
LAYOUTS = {
    "Qwen3Next": kv_layout(3, 2, 32, "float32", states(4, 32), (0, 2)),
    "Qwen3_5Moe": kv_layout(3, 2, 32, "float32", states(4, 32), (0, 2)),
    "NemotronH": kv_layout(4, 2, 16, "float32", states(8, 16), (0, 1, 3)),
    "Lfm2": kv_layout(4, 2, 16, "float32", (CacheArray(STATE, "x", 2, 4, 16, "float32"),), (0, 2, 3)),
    "KimiLinear": kv_layout(3, 3, 16, "float32", states(4, 16, 4), (0, 2), kind=LATENT),
}


@pytest.mark.all
@ON_CPU
@pytest.mark.parametrize(
    ("kind", "prefill_ranks", "decode_ranks"),
    [
        ("Bamba", 1, 1), ("Bamba", 4, 1), ("Qwen3_5Moe", 1, 2), ("KimiLinear", 2, 1), ("Lfm2", 1, 2),
        # Their kinds of caches and their numbers of ranks are among those above, or in `SHORT`.
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("GraniteMoeHybrid", 1, 1), ("Bamba", 1, 2), ("KimiLinear", 1, 1), ("Qwen3Next", 2, 4),
                ("NemotronH", 2, 1),
            )
        ),
    ],
)  # fmt: skip
def test_states_are_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, prefill_ranks: int, decode_ranks: int
) -> None:
    """The tokens are those of transformers, wherever a prompt ends within a chunk. 4 ranks share 2 groups.
    From 2 to 4 ranks KV and states go through exported memory.

    Two chats go on. The prefill worker begins with a copy of the states, the decode worker with its KV."""
    monkeypatch.setattr("baton.engine.core.state_copies.END_TOKENS", 16)
    reference, rng = save_tiny(tmp_path, kind), random.Random(4)
    layout = LAYOUTS.get(kind, MAMBA)
    settings: dict[str, Any] = {
        "num_blocks": 60,
        "max_num_batched_tokens": 16,
        "enable_prefix_caching": True,
        "exports": (prefill_ranks, decode_ranks) == (2, 4),
    }
    prefill = Side(tmp_path, layout, prefill_ranks, block_size=16, **settings)
    decode = Side(tmp_path, layout, decode_ranks, block_size=32, **settings)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 2, 15, 16, 17, 31, 32, 33, 70)]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        return pair.run([EngineRequest(os.urandom(16), prompt, [], sampling) for prompt in prompts])

    with closing(prefill), closing(decode):
        pair = Pair(prefill, decode)
        tokens = answers(prompts[:5]) + answers(prompts[5:])
        assert not any(prefill.sink.cached.values())
        prompts += [[*prompts[i], *tokens[i], 9, 8, 7] for i in (5, 8)]
        tokens += answers(prompts[-2:])
        assert sorted(list(prefill.sink.cached.values())[-2:]) == [16, 64]
        assert sorted(pair.cached[-2:]) == [32, 64]
        transports = prefill.transfer.stats().transports.values()
        assert ("shared_memory" in transports) == settings["exports"]
    for prompt, found in zip(prompts, tokens, strict=True):
        assert len(found) == 6
        assert found == scores(reference, prompt, found).argmax(-1).tolist(), f"{len(prompt)} tokens"
