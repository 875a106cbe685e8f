"""Several ranks compute the same tokens as one.

The ranks are threads here. Each has its own part of the model, its own place in the shared memory, and its
own view of the commands, as a process has.
"""

import copy
import json
import os
import random
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine import Engine, EngineConfig
from baton.engine.arrange import arrange
from baton.engine.execution import commands, host_ranks
from baton.engine.execution.commands import SLOTS, Commands, Sample, Stage, Stop
from baton.engine.execution.host_ranks import HostRanks
from baton.engine.execution.rank import open_store
from baton.engine.execution.rank_files import RankFiles
from baton.engine.kernels import Fp8Experts, parts
from baton.engine.loader import check_model
from baton.engine.step import NOT_SCORED, Draws, Scored, Step, Variant
from tests.engine.checkpoints import assert_refused
from tests.engine.conftest import request_of, run, save_tiny, tokens_of
from tests.engine.mixed_requests import SMALL_POOL, mixed_requests
from tests.within import WITHIN

NINE_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
FAMILIES = [
    pytest.param("Llama", {}, (2, 4), id="llama"),
    pytest.param("Llama", NINE_HEADS, (3,), id="llama-nine-heads"),
    pytest.param("Llama", {"tie_word_embeddings": True, "attention_bias": True}, (2,), id="llama-tied-bias"),
    pytest.param("Mistral", {"sliding_window": None, "head_dim": 32}, (2,), id="mistral"),
    pytest.param("Qwen2", {}, (2,), id="qwen2"),
    pytest.param("Qwen3", {"head_dim": 32}, (4,), id="qwen3"),
    pytest.param("Qwen3Moe", {}, (2,), id="qwen3-moe"),
    pytest.param("Llama4", {"interleave_moe_layer_step": 2}, (2,), id="llama4"),
    pytest.param("GptOss", {}, (4,), id="gpt-oss"),
    pytest.param("Phi3", {}, (2,), id="phi3"),
    pytest.param("Gemma3", {}, (4,), id="gemma3"),
    pytest.param("Olmo2", {}, (4,), id="olmo2"),
    pytest.param("Glm4", {}, (4,), id="glm4"),
    pytest.param("Bamba", {"mamba_proj_bias": True}, (2, 4), id="bamba"),
    pytest.param("GraniteMoeHybrid", {"mamba_n_groups": 1}, (2,), id="granite-moe-hybrid"),
    pytest.param("Qwen3Next", {"attention_bias": True}, (2,), id="qwen3-next"),
    pytest.param("Qwen3_5", {}, (2,), id="qwen3.5"),
    pytest.param("Qwen3_5MoeText", {}, (4,), id="qwen3.5-moe"),
    pytest.param("KimiLinear", {}, (2,), id="kimi-linear"),
    pytest.param("Lfm2", {"conv_bias": True}, (2,), id="lfm2"),
    pytest.param("Lfm2Moe", {}, (2,), id="lfm2-moe"),
    pytest.param("Step3p7", {}, (2,), id="step-3.7"),
    pytest.param("MiMoV2Flash", {"num_key_value_heads": 1}, (2,), id="mimo-v2-flash"),
    pytest.param("MiniMaxM2", {}, (4,), id="minimax-m2"),
    pytest.param("NemotronH", {"moe_latent_size": 32}, (4,), id="nemotron-h", marks=pytest.mark.long),
    pytest.param("Gemma4Text", {}, (2,), id="gemma4"),
    pytest.param("DeepseekV2", {}, (2,), id="deepseek-v2-lite"),
    pytest.param("DeepseekV3", {"kv_lora_rank": 16}, (2, 4), id="deepseek-v3"),
    pytest.param("Glm4MoeLite", {}, (2,), id="glm4-moe-lite"),
    pytest.param("GlmMoeDsa", {}, (2,), id="glm5"),
]
"""With the sizes of the group: 4 ranks share 2 KV heads, and 2 groups of Mamba heads. No size divides the 199
tokens."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "changes", "sizes"), FAMILIES)
def test_the_tokens_and_the_fingerprint_are_those_of_one_rank(
    kind: str, changes: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path, ranks: Callable[..., Engine]
) -> None:
    save_tiny(tmp_path, kind, **changes)
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 199) for _ in range(n)] for n in (1, 2, 5, 17, 60)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}]
    requests = [
        request_of(i, prompt, max_tokens=6, ignore_eos=True, seed=i, **kinds[i % 3])
        for i, prompt in enumerate(prompts)
    ]

    def tokens(size: int) -> tuple[str, list[list[int]]]:
        engine = ranks(tmp_path, size, max_num_batched_tokens=24, max_num_seqs=5)
        return engine.model_fingerprint, tokens_of(engine, requests)

    expected = tokens(1)
    for size in sizes:
        assert tokens(size) == expected, size


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "changes", "config", "sizes"),
    [
        pytest.param("Qwen3Moe", {}, {}, (2, 4), id="qwen3-moe"),
        pytest.param("Qwen3Moe", {"hidden_size": 128}, {"quantization": "fp8"}, (2,), id="qwen3-moe-fp8"),
        pytest.param("Llama4", {}, {}, (2,), id="llama4"),
        pytest.param("GptOss", {}, {}, (2,), id="gpt-oss"),
        pytest.param("GraniteMoeHybrid", {}, {}, (2,), id="granite-moe-hybrid"),
        pytest.param("DeepseekV3", {}, {}, (4,), id="deepseek-v3"),
    ],
)
def test_whole_experts_on_each_rank_give_the_same_tokens(
    kind: str,
    changes: dict[str, Any],
    config: dict[str, Any],
    sizes: tuple[int, ...],
    tmp_path: Path,
    ranks: Callable[..., Engine],
) -> None:
    save_tiny(tmp_path, kind, **changes)
    requests = [
        request_of(i, range(3 + i, 3 + i + length), max_tokens=10, ignore_eos=True, seed=i, temperature=i % 2)
        for i, length in enumerate((1, 5, 40))
    ]

    def outcome(size: int) -> tuple[str, list[list[int]], Any]:
        """The fingerprint, the tokens, and how many tokens each expert of each layer computed."""
        engine = ranks(
            tmp_path,
            size,
            max_num_batched_tokens=24,
            max_num_seqs=3,
            enable_expert_parallel=size > 1,
            itl_target=60.0,  # chunks follow no speed: the last layer computes a token for each of them
            **config,
        )
        tokens = tokens_of(engine, requests)
        load, gate_up = engine.runner.expert_load, engine.runner.model.layers[-1].mlp.experts.gate_up
        experts = gate_up.values if isinstance(gate_up, Fp8Experts) else gate_up
        assert load is not None
        assert len(experts) * size == 8
        return engine.model_fingerprint, tokens, load.totals.tolist()

    expected = outcome(1)
    for size in sizes:
        assert outcome(size) == expected, size


@pytest.mark.all
def test_every_kind_of_request_gets_the_tokens_of_one_rank(
    spelled_path: Path, ranks: Callable[..., Engine]
) -> None:
    requests = mixed_requests()

    def outputs(size: int) -> list[Any]:
        engine = ranks(spelled_path, size, **SMALL_POOL)
        results = run(engine, requests)
        engine.assert_whole()
        stats = engine.stats()
        assert stats.preemptions
        assert stats.prefix_cache_hits
        return [results[request.id] for request in requests]

    for one, two in zip(outputs(1), outputs(2), strict=True):
        assert two.tokens
        assert (two.tokens, two.finish_reason) == (one.tokens, one.finish_reason)
        for of_one, of_two in zip(one.outputs, two.outputs, strict=True):
            if of_one.logprobs is not None:
                assert of_two.logprobs.top_ids == of_one.logprobs.top_ids
                assert of_two.logprobs.logprob == pytest.approx(of_one.logprobs.logprob, abs=1e-4)


@pytest.mark.gpu
def test_two_gpus_compute_the_tokens_of_one(spelled_path: Path) -> None:
    """With CUDA graphs and overlap. Each engine has a process, since a process joins one group only."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    commands = [
        [sys.executable, "-m", "tests.engine.mixed_requests", str(spelled_path), str(size)] for size in (1, 2)
    ]
    one, two = (
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
        for command in commands
    )
    assert one == two


def test_a_size_that_does_not_divide_the_heads_is_refused(tiny_path: Path) -> None:
    message = r"size 3: the model has 4 query .* 2 KV heads; choose one of 1, 2, 4"
    assert_refused(tiny_path, message, tensor_parallel_size=3)


def test_each_rank_holds_its_share_of_the_memory(tiny_path: Path, ranks: Callable[..., Engine]) -> None:
    one, two = (ranks(tiny_path, size, num_blocks=None, max_num_seqs=4) for size in (1, 2))
    assert two.num_blocks == one.num_blocks
    assert [parts(cache)[0].nbytes * 2 for cache in two.caches] == [
        parts(cache)[0].nbytes for cache in one.caches
    ]
    embedding = two.runner.model.embedding.weight
    assert embedding.shape == (100, 64), "of 199 tokens"


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_exchange_tensors_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_ranks, "PLACE_BYTES", 64)
    files = RankFiles.create(size)

    def exchange(rank: int) -> list[Any]:
        ranks = HostRanks(rank, size, files.exchange)
        found: list[Any] = []
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 7):
                x = torch.arange(rows * 9, dtype=dtype).view(rows, 9) * (rank + 1)
                columns = ranks.shard(7)
                part = torch.arange(rows * 7.0).view(rows, 7)[:, columns.indices].contiguous()
                found += [
                    ranks.gather(part, 7).tolist(),
                    ranks.all_reduce(x).tolist(),
                    ranks.minimum(5 - rank),
                    ranks.agreed([rank + 0.1, 2]),
                ]
                ranks.broadcast(x := torch.full((40,), rank + 3))
                found.append(x.tolist())
        return found

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(exchange, range(size)))
    files.close()
    expected = []
    for _ in range(2):
        for rows in (1, 7):
            total = torch.arange(rows * 9.0).view(rows, 9) * sum(range(1, size + 1))
            gathered = torch.arange(rows * 7.0).view(rows, 7)
            expected += [gathered.tolist(), total.tolist(), 6 - size, [0.1, 2], [3] * 40]
    assert found == [expected] * size


def test_a_store_outlives_its_file() -> None:
    """When it goes, torch opens it again, or aborts the process: here a fork. By then the file is closed, and
    the number of the descriptor may be that of a socket."""
    if (pid := os.fork()) == 0:
        files = RankFiles.create(2)
        fd, store = files.exchange, open_store(files.exchange, 2)
        store.set("key", "value")
        files.close()
        ends = socket.socketpair()
        os.dup2(ends[0].fileno(), fd)
        del store
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_command_arrives_as_it_was_sent() -> None:
    """More commands than the ring has slots; the reader is slower than the writer."""
    files = RankFiles.create(3)
    writer, *readers = (Commands(files, tokens=20, requests=4, table_width=6) for _ in range(3))
    steps = [step(seed) for seed in range(3 * SLOTS)]
    received: list[list[Step]] = [[], []]

    def read(rank: int) -> None:
        for command in readers[rank - 1].received(rank):
            if isinstance(command, Step):
                received[rank - 1].append(copy.deepcopy(command))

    threads = [threading.Thread(target=read, args=(rank,)) for rank in (1, 2)]
    for sent in steps[: SLOTS // 2]:  # before the readers begin
        writer.run(sent)
        writer.send(Sample())
    for thread in threads:
        thread.start()
    for sent in steps[SLOTS // 2 :]:
        writer.run(sent)
        writer.send(Sample())
    writer.send(Stop())
    for thread in threads:
        thread.join(10)
    files.close()
    for of_rank in received:
        for sent, got in zip(steps, of_rank, strict=True):
            for name in Step.__slots__:
                np.testing.assert_equal(getattr(got, name), getattr(sent, name))
                if isinstance(value := getattr(sent, name), np.ndarray):
                    assert getattr(got, name).dtype == value.dtype


def test_a_rank_goes_on_with_a_layer_when_rank_0_does() -> None:
    """Rank 0 waits for KV, which other threads copy to all ranks."""
    files, order = RankFiles.create(2), list[str]()
    first, other = (Commands(files, tokens=20, requests=4, table_width=6) for _ in range(2))
    arrived = threading.Semaphore(0)
    waits = other.waited(1, lambda layer: arrived.release())

    def compute() -> None:
        for layer in range(3):
            waits(layer)
            order.append(f"rank 1, layer {layer}")

    def wait_for_kv(layer: int) -> None:
        assert arrived.acquire(timeout=WITHIN)
        order.append(f"KV of layer {layer}")

    thread = threading.Thread(target=compute)
    thread.start()
    go_on = first.waited(0, wait_for_kv)
    for layer in range(3):
        go_on(layer)
    thread.join(10)
    files.close()
    assert order == [f"{what} {layer}" for layer in range(3) for what in ("KV of layer", "rank 1, layer")]


def test_rank_0_waits_until_all_ranks_have_read_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event wakes it, and an earlier reading that is not wanted any more does not end the wait."""
    files = RankFiles.create(3)
    first, *others = (Commands(files, tokens=20, requests=4, table_width=6) for _ in range(3))
    monkeypatch.setattr(commands, "time", None)  # nothing polls
    first.stage("/not wanted")
    wait = first.stage("/wanted")
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(wait)
        for number, reason in ((1, "an earlier one"), (2, "")):
            for rank, other in enumerate(others, 1):
                assert not waited.done()
                other.answer(rank, Stage(number, ""), reason)
        waited.result(WITHIN)
    wait = first.stage("/wrong")
    for rank, (other, reason) in enumerate(zip(others, ("", "other shapes"), strict=True), 1):
        other.answer(rank, Stage(3, ""), reason)
    with pytest.raises(ValueError, match="rank 2: other shapes"):
        wait()
    files.close()


def step(seed: int) -> Step:
    """A random step of three requests, one of them a chunk of a prompt."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, 4))
    draws = [rng.random(rows), rng.integers(-9, 9, rows), rng.integers(1, 9, rows), *rng.random((2, rows))]
    types = [np.float32, np.int32, np.int32, np.float32, np.float32]
    scored = Scored(rng.integers(0, 7, 1 + seed), rng.integers(0, 9, 1 + seed), seed)
    return arrange(
        rng.integers(0, 9, 7).tolist(), [4, 9, 3], [5, 10, 8],
        [array("i", rng.integers(0, 99, 3).tolist()) for _ in range(3)],
        list(range(rows)), Variant(seed % 3),
        Draws(*(values.astype(type_) for values, type_ in zip(draws, types, strict=True))),
        num_decodes=2, hands_over=bool(seed % 2), block_size=4, table_width=6,
        scored=scored if seed % 2 else NOT_SCORED,
        state_slots=rng.integers(0, 9, 3).tolist() if seed % 3 else None,
        restores=[(int(rng.integers(9)), i) for i in range(seed % 3)], saves=[(seed, 1)] * (seed % 2),
        copies=[(6, seed)] * (seed % 3),
    )  # fmt: skip


def test_expert_parallel_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Qwen3Moe", num_experts=6)
    with pytest.raises(ValueError, match=r"--enable-expert-parallel: needs --tensor-parallel-size above 1"):
        EngineConfig(str(tmp_path), enable_expert_parallel=True)
    fits = EngineConfig(str(tmp_path), tensor_parallel_size=2, enable_expert_parallel=True)
    check_model(fits)
    with pytest.raises(ValueError, match=r"size 4: with --enable-expert-parallel it must .* 6 experts"):
        check_model(replace(fits, tensor_parallel_size=4))
